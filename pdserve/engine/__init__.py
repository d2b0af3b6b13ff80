"""The engine: model, weights, paged KV, block pool, scheduler, sampler. Knows nothing of networks.

It deals in token ids only, and runs the same code for a prefill node, a decode node and the
co-located mode: a request's `num_computed_tokens` chases its `num_tokens`, and there is no phase.
"""
