"""Code below PyTorch models: C++ for CPUs (`cpu/`), transfer, clocks and graphs of GPUs (`device/`)."""
