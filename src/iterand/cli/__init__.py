"""The command line: the only place that parses arguments, prints or exits."""
