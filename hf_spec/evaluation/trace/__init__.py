"""The rounds of a generation, recorded and drawn."""
