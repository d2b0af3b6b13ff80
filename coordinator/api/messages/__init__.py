"""Anthropic's Messages API, in other words than chat: its requests, blocks, events and errors.

A request (`requests`) has blocks, of which `blocks` makes chat messages, and `chat_request` a chat.
What is planned and run is that chat (`plan`). Only the answer differs: `output` makes blocks and
events (`objects`, `events`) of its pieces, which `format` encodes. `errors` says what failed.
"""
