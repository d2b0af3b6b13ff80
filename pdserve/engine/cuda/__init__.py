"""The engine on NVIDIA GPUs. Imported only if a GPU is requested: its kernels need Triton."""
