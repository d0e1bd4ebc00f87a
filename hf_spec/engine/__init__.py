"""The engine that runs and verifies drafts of every method."""
