"""Speculative methods, one folder each."""
