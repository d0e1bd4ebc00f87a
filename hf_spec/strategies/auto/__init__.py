"""The strategy `auto`: what to draft with, how deep, and at what cost."""
