"""Where a model lies: devices, offloaded weights, ranks, and what is sent between them."""
