"""Benchmarks: `suite` builds contenders, `runner` times them, `summary` and `report` evaluate."""
