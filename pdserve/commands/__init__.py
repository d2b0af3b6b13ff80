"""What the `pdserve` command does: starts, measures and predicts clusters. Above the processes."""
