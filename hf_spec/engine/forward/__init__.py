"""Draft trees as packed forward passes: rows, steps, attention, keys and values."""
