"""Neural parts: draft models, and the heads and adapters of the trained methods."""
