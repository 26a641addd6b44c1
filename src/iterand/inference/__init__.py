"""A ticket as a program."""
