"""The engine: runs draft trees of every method through a model, and verifies them.

`runner.py` is one model on draft trees; it joins `forward/` (packing, attention, storage),
`models/` (architecture quirks) and `fast/` (accelerators). `decode/` is the loop above it.
"""
