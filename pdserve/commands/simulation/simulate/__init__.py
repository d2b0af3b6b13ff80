"""`pdserve simulate`: what a cluster would do with a load."""
