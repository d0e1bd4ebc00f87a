"""gemma_assistant."""
