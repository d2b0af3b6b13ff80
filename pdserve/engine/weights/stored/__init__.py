"""The tensors of a checkpoint as its files have them, a file for each format."""
