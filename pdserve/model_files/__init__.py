"""A model's files: found, identified, and its tokenizer loaded."""
