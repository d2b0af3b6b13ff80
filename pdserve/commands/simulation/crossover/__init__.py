"""`pdserve bench crossover`: how formats and drafts move the best mode and the ratio of pools."""
