"""Drafts from a head: a layer or so that goes on from what the model itself has computed.

    a step, which copies rows out (`steps/taps.py`) ─► source.py: whose drafts, how many
    ─► a head: one token after the other ─► the next plan

A stream has its first drafts behind token 1. Where that was sampled elsewhere, its row has come
with the handoff. What a head keeps of a stream, `head.HeadKv`, is never moved.
"""
