"""`hf-spec ui`: `command` (options), `comparison` (timing), `page` (Gradio), `rendering` (HTML)."""
