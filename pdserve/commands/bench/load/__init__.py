"""What benchmarks send, and what their clients see: workloads, clients, outcomes, scores."""
