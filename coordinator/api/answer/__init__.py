"""A running call, and its answer on the way to the client.

`run` sends what a `call` makes of the token events that arrive (`arrivals`). A
`choice` turns them into text and scores; `formats` and `chat_format` encode that as `bodies`, whole
or as events (`sse`).
"""
