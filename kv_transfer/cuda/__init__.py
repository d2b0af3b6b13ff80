"""KV pools on NVIDIA GPUs, and copying between them."""
