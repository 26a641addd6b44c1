"""A ticket: what must be kept of a network, about a bit a weight, and how to get the network back from it."""

from iterand.ticket.load import load_ticket
from iterand.ticket.read import Ticket, read_ticket
from iterand.ticket.save import save_ticket

__all__ = ["Ticket", "load_ticket", "read_ticket", "save_ticket"]
