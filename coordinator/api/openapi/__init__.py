"""The API described: /openapi.json, made from the structs that bodies are read into, and /docs."""
