"""POST /v1/embeddings: each prompt is prefilled, and nothing is decoded."""
