"""Who has the KV blocks: the pool, how much of it stays free, and who gives blocks back."""
