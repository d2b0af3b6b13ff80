"""POST /v1/embeddings: prompts that end with themselves, each a prefill and nothing else."""
