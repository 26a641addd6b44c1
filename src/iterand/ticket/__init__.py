"""Tickets: files of about one bit per weight that rebuild a masked network bit for bit."""

from iterand.ticket.load import load_ticket
from iterand.ticket.read import Ticket, read_ticket
from iterand.ticket.save import save_ticket
from iterand.ticket.tasks import MaskOverlap, TaskSet

__all__ = ["MaskOverlap", "TaskSet", "Ticket", "load_ticket", "read_ticket", "save_ticket"]
