"""`pdserve bench step`: how far engine steps are from what the hardware allows."""
