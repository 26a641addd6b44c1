"""The experiments of the paper, a file for each kind of question."""
