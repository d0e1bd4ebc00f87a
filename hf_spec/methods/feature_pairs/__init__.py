"""feature_pairs."""
