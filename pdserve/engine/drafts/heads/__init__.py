"""Drafts from a head: one layer that goes on from what the model itself has computed.

    a step of decodes, which copies out the residual stream before three layers (`steps.batch.Taps`)
    ─► source.py: whose drafts, how many ─► eagle3.py: one token after the other ─► the next plan

A stream has its first drafts behind its second token here: so nothing of the prompt is needed, and
nothing goes into the handoff. What a head keeps of a stream is never moved.
"""
