"""Attention on GPUs: the backends, which of them work and are fastest, and our Triton kernels."""
