"""Prefixes: what is fetched from other nodes or the host tier, and what is given to others."""
