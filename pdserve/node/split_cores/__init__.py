"""Multiplexed mode: a prefill and a decode node share their host's cores.

steps: before each, ask ──► demand: for how many ──► pair: tell the other node, and the kernels
"""
