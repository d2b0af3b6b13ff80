"""What prefill and decode nodes share: joining the cluster, sessions, start and drain.

A role (`prefill_node.service`, `decode_node.service`) is handed its parts by `runtime.serve` and
implements `roles.Role`.
"""
