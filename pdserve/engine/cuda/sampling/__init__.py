"""Sampling on GPUs, by kernels."""
