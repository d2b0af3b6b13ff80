"""The prefill node: turns prompts into KV and token 1, and holds the KV until it is pulled."""
