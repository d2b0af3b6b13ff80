"""What a coordinator knows of its nodes.

`registry` has the members, and `absent` those that are missing. `revisions` says who may join, and
who gets which requests; `shares` among how many coordinators the nodes are shared. `clock_offset`
is how far a node's clock is ahead.
"""
