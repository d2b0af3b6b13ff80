"""`pdserve doctor --cluster`: the command, and one module per group of checks.

A check is a function of what coordinators tell in `/status`. It returns at least one finding: what
is wrong and what to do about it, or that all is well.
"""
