"""The Responses API, which keeps something between requests: /v1/responses and /v1/conversations.

A call is a chat call in other words (`coordinator/api/responses`). `asked` reads the body and finds
the conversation that it continues, `plan` has the chat planned, and `keeper` stores what comes of
it in `storage/`. `again` generates background responses from their orders whose coordinator ended
before they did.

`endpoint` answers over HTTP, `websocket` over a WebSocket (`socket_inbox`, `frame_count`);
`background` generates a response independently of its client, and `follow` streams it to any
client. `stored_responses` and `conversations` are the endpoints on what is kept (`pages`).
`compact` lets the model summarise a conversation.

`routes.add_stateful_routes` adds all of it to the API, which knows nothing of it.
"""
