"""Recipes are YAML files to copy, not code to import: `minitlt recipes`, `minitlt copy NAME DEST`."""
