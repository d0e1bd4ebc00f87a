"""Evaluation of strategies.

- `lossless/`: does a strategy keep the model's output? (`hf-spec verify`, `hf-spec check-head`)
- `bench/`: is it faster, and where does the time go? (`hf-spec bench`)
- `bench/calibrate/`: which options of a method are fastest here? (`hf-spec calibrate`)
- `trace/`: what happened in each round? Records and pictures for notebooks and `hf-spec ui`.
"""
