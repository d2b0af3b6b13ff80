"""Multiplexed mode: a node computes decodes and prompts side by side, on shares of its cores.

phases: two engines over one pool ──► steps: before each, ask ──► demand: for how many cores
"""
