"""What outlives a request: kept responses and conversations, background runs, WebSockets."""
