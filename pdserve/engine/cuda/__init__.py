"""The engine on NVIDIA GPUs. Imported only where one is asked for: its kernels need Triton."""
