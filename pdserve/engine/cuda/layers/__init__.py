"""The forward pass of a step, and the fused kernels between products and attention."""
