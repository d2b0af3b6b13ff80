"""`pdserve plan`: which cluster a load needs, and what it costs."""
