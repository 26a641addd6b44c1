"""Experiments: recipes, tables of runs, and the engines that run them."""
