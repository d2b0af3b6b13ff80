"""Drafts from a smaller model of the same vocabulary, on the node that decodes.

    end of a step ─► source.py: whose drafts, how many, at which cost ─► draft_model.py: small steps
    of all of them together, in the thread that computes steps ─► the plan of the next step, in
    which `Speculation` finds the drafts ready

The model has KV of its own, for prompts too: it computes them in slices, while the stream decodes
without its drafts. What it knows of a stream is never moved, announced or hashed, and may be
dropped at any time: who lacks it goes without drafts.
"""
