"""What the Responses API says in other words than chat: its requests, items, events and answers.

Input items (`requests`) become conversation items (`input_items`, `items`), which `messages` turns
into chat messages; `chat_request` makes a chat request of all. `truncation` says which items may be
dropped; `compaction` seals a summary. Only the output differs: `format` and `output` encode the
pieces of an answer (`answer/pieces.py`) as items and typed events (`events`).

Nothing here outlives a call: see `coordinator/stateful`.
"""
