"""Pairs of nodes: which can hand off, which do, and which share a host."""
