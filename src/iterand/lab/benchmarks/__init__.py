"""How fast it is: measurements of the parts that cost time and memory, one file each."""
