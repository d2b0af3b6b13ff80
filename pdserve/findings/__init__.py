"""What is wrong with a cluster, by what its coordinators tell in `/status`, and what to do.

One module per group of checks. A check is a function of a status and returns at least one finding:
what is wrong and what to do about it, or that all is well. `pdserve doctor --cluster` prints them,
and the page at `/` shows those that are not well.
"""
