"""`hf-spec demo`: `command` (options), `entries` (prompts), `session` (timing), `replay`."""
