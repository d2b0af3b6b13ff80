"""A puller's link to one exporter: which transport it uses, and which pulls are in flight on it."""
