"""Products with quantised weights on a GPU."""
