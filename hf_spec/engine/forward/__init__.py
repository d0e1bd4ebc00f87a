"""Runs one model on draft trees: rows, packed steps, attention, keys and values."""
