"""What `generate()` meets: the hook, the checks of a call, and one call of the engine."""
