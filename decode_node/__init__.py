"""The decode node: pulls KV, streams tokens; prefills for itself in co-located mode."""
