"""Checkpoints to measure: named shapes with random weights."""
