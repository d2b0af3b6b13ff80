"""OpenAI's Responses API, for text: POST, GET and DELETE /v1/responses.

A call becomes a chat call: `requests` is its body, `conversation` makes chat messages of its items,
`chat_request` a ChatRequest of everything. From there on it goes the way of all chat calls, with
the same checks, limits and terms. Only what is seen of it differs: `format` and `output` put the
answer as items (`objects`) and typed events (`events`). `store` keeps answers to go on from.
"""
