"""Support for single architectures: positions, masks, states and caches that differ."""
