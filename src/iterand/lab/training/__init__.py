"""Training by a recipe: ``run.py`` tells a run from start to end."""
