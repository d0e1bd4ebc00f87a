"""Measurements: losslessness (`lossless/`), speed (`bench/`), and recorded rounds (`trace/`)."""
