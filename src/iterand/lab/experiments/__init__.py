"""Experiments: recipes, runs of them, and what they show."""
