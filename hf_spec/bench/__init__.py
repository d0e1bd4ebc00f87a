"""Benchmarks of decoding: all contenders in one process, prompt by prompt, interleaved."""
