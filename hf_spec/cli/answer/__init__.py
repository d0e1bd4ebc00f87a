"""`hf-spec generate` and `hf-spec chat`."""
