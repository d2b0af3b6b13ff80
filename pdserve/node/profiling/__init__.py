"""A node's profile: what its steps cost, measured before it is READY."""
