"""Device code: C++ of compiled layers (`cpu/`); transfer, clocks and CUDA graphs (`device/`)."""
