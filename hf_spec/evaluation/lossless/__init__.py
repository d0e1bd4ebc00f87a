"""Checks that a strategy keeps the output, and that a published head is read correctly."""
