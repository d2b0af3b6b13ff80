"""How large the two pools are.

`loads` says how close each pool is to breaking promises, from the nodes' reports. `rebalancer`
decides by that when a node changes pools, and `role_changes` has it change.
"""
