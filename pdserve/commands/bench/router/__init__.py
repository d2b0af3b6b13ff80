"""`pdserve bench router`: what a placement decision costs among very many nodes."""
