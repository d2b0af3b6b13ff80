"""Sessions between two nodes: one node subscribes, the other announces its KV."""
