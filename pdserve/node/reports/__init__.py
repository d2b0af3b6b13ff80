"""What a node tells others: metrics, its load, its costs, its cached blocks."""
