"""`hf-spec ui`: plain and speculative answers side by side on a page in the browser."""
