"""falcon."""
