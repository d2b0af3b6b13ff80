"""The API's description: /openapi.json, generated from the request structs, and /docs."""
