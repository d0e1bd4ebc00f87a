"""pard."""
