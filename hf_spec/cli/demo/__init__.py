"""`hf-spec demo`: a small real model answers four prompts plainly and speculatively."""
