"""`hf-spec demo`: `command` (options), `entries` (prompts), `session`, `replay`, `watch`."""
