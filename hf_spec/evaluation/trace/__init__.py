"""Recording and drawing of the rounds of a generation."""
