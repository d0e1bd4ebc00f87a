"""Proof that a strategy leaves the output as it is."""
