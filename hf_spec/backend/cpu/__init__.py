"""What a CPU computes fast: products of packed weights, and C++ of decoder layers."""
