"""A place of a node: what it shares with the other models that are awake there."""
