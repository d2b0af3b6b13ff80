"""A running call, and its answer on the way to the client."""
