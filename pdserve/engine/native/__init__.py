"""The model on CPUs: packed weights, and the C++ decoder that computes a step in one call."""
