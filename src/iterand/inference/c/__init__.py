"""C sources for exported networks: a decoder of tickets (``ticket.c``)."""
