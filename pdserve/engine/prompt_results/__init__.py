"""What a request wants of its prompt besides KV: scores, embeddings, several first tokens."""
