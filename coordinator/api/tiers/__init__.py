"""Calls for a cascade: planned for one tier after the other, until an answer is good enough.

Each tier has its own tokenizer and template, so the whole plan of a call is made anew for it, as if
the client had asked for that model. Which tier answers is decided while the call is planned, before
the first byte: what runs the plan finds its generations running already (`CallPlan.started`).
"""
