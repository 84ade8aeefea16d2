"""Warm drafters, by the name that `drafter.start` takes: one folder each."""
