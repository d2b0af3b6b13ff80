"""Adapters: small changes to a model, of which each request may have one.

Any mix of them is computed in one step. A row's bits depend on its own adapter, not on others'.
"""
