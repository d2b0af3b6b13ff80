"""`pdserve bench coordinator`: what a coordinator, or any other gateway, costs."""
