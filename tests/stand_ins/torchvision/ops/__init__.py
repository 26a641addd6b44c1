"""Operators, of which timm's layers name one."""
