"""What the config of a quantised checkpoint says: how its matrices are stored."""
