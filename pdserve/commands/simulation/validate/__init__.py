"""`pdserve bench prediction`: simulations of clusters beside the clusters themselves."""
