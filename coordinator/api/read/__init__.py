"""From the bytes of a body to a typed request.

`body` reads and decodes it within bounds (`body_budget`, `json_text`); errors name the parameter at
fault (`parameters`, `allowed_values`). `chat` has the struct of a chat and its checks, `fields` has
what endpoints share, `terms` the service terms.
"""
