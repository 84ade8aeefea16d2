"""Recipes are YAML files to copy, not code: `minitlt recipes`, `minitlt copy NAME DEST`."""
