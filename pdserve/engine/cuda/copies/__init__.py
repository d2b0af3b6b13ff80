"""Copies between host and GPU: of steps, and of weights."""
