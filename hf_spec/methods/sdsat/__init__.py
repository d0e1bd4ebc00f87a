"""sdsat."""
