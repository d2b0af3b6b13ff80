"""What is asked of the nodes: the parts of the answer, and how its tokens are sampled."""
