"""Benchmarks of decoding: contenders in one process, prompt by prompt, interleaved."""
