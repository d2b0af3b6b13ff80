"""A node's memory: what the machine has, and the pool for KV."""
