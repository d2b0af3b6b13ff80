"""OpenAI's Responses API, for text: /v1/responses and /v1/conversations.

A call is translated to a chat call. `asked` reads the body and finds the conversation it continues:
input items (`item_requests`) become conversation items (`given`, `items`), which `conversation`
turns into chat messages; `truncation` says which items may be dropped. `plan` uses chat's planning,
with the same checks, limits and service terms. Only the output differs: `format` and `output`
encode the answer as items and typed events (`events`).

`endpoint` answers over HTTP, `websocket` over a WebSocket; `background` generates a response
independently of its client, and `follow` streams it to any client. `store` keeps responses and
conversations (`stored`); `kept` and `conversations` are the endpoints on those. `compact` lets the
model summarise a conversation.
"""
