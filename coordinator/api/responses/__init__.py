"""OpenAI's Responses API, for text: /v1/responses and /v1/conversations.

A call is translated to a chat call. `asked` reads the body and finds the conversation it continues:
input items (`item_requests`) become conversation items (`input_items`, `items`), which
`conversation` turns into chat messages; `truncation` says which items may be dropped. `plan` uses
chat's planning, with the same checks, limits and service terms. Only the output differs: the answer
is split into pieces (`answer_pieces`), which `format` and `output` encode as items and typed events
(`events`).

`endpoint` answers over HTTP, `websocket` over a WebSocket; `background` generates a response
independently of its client, and `follow` streams it to any client. `store` keeps responses and
conversations (`stored`); `stored_responses` and `conversations` are the endpoints on those.
`compact` lets the model summarise a conversation.
"""
