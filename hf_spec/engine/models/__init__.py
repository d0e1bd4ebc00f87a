"""What single model architectures need beyond the common forward pass."""
