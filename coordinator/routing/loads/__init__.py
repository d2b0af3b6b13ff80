"""What this coordinator has sent to each node, and what of it has not ended."""
