"""Pairs of nodes: which can hand off, and which do."""
