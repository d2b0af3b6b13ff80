"""`pdserve bench transfer`: how fast KV moves from one process to another."""
