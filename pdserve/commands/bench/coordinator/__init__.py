"""`pdserve bench coordinator`: what a coordinator, or another server in its place, costs."""
