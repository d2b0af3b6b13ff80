"""`pdserve bench perf-model`: how accurate predicted step times are."""
