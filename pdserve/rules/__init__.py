"""What nodes, the coordinator, and simulations of both decide alike."""
