"""Chat templates: what renders conversations, in processes of its own (`child.py`).

Those begin in a moment, so nothing here imports what a tokenizer or an event loop needs.
"""
