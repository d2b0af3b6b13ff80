"""The transports for KV, in one or two files each. Their common interface is interface.py."""
