"""What a coordinator knows of its nodes.

`registry` has the members, and among how many coordinators they are shared, and `absent` those that
are missing. `revisions` says who may join, and who gets which requests.
"""
