"""`hf-spec generate` and `hf-spec chat`: answers in the terminal."""
