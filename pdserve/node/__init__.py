"""What prefill and decode nodes share: cluster membership, sessions, prefixes, start and drain.

A node has two services over one engine: `prefill_node.service` and `decode_node.service`, both
implementing `roles.Service`. `assembly` builds the parts that they share; `services` passes legs
and finished steps on to them. `runtime` is the life of the process.
"""
