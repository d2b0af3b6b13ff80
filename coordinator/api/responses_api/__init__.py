"""OpenAI's Responses API, for text: /v1/responses and /v1/conversations.

A call becomes a chat call. `asked` is what its body asks for and goes on from: given items
(`item_requests`) become kept items (`given`, `items`), and `conversation` makes chat messages of
those; `truncation` says which may be left out. `plan` has chat plan the rest, with the same checks,
limits and terms. Only what is seen of it differs: `format` and `output` put the answer as items and
typed events (`events`).

`endpoint` answers over HTTP, `websocket` over a WebSocket; `background` makes a response without
its client, and `follow` streams it to whoever comes. `store` keeps responses and conversations
(`stored`); `kept` and `conversations` are the endpoints on those. `compact` has the model make a
conversation short.
"""
