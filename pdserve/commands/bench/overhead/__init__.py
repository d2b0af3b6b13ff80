"""`pdserve bench overhead`: what a decode step costs besides the model."""
