"""draft_model."""
