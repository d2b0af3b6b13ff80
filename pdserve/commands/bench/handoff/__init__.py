"""`pdserve bench handoff`: from the end of prefill to the first decode step."""
