"""A node's start: which cores, which model, its weights."""
