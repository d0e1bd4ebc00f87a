"""Optional accelerators of the forward pass: packed weights, compiled layers, CUDA graphs."""
