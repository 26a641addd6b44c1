"""``python -m iterand`` is the same as ``iterand``."""

from iterand.cli.main import main

main()
