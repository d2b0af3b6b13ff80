"""What prefill and decode nodes share: joining the cluster, sessions, start, drain, their role.

A node has two services (`prefill_node.service`, `decode_node.service`; `roles.Service`) over one
engine. They are handed their parts by `assembly`, and hear of legs and steps from `services`.
"""
