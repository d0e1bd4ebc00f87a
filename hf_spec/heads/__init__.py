"""Heads that others have published: their weights read, run beside a target."""
