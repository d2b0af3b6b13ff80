"""Commands for a cluster that runs, and for what it has written."""
