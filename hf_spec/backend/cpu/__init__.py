"""Linear layers with packed weights, and C++ generated for decoder layers."""
