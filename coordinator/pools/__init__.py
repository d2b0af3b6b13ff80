"""How large the two pools are.

`loads` says how close each pool is to breaking promises, from the nodes' reports. By that,
`rebalancer` decides when a node changes pools, and `desired` how many each pool should have;
`standby` gives a pool that lacks one a node that has loaded and waits. `role_changes` has them do
so, and `drains` has them end. `pools` wires them.
"""
