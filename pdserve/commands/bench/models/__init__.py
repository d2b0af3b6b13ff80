"""`pdserve bench models`: what requests to sleeping models wait, and a mix of many models."""
