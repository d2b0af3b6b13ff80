"""`pdserve`: run one process, run a whole cluster, look at one, and look at this machine.

Only `main`, `flags` and the config structs are imported for every command; the rest is loaded by
the command that needs it, so that a coordinator started from here stays free of torch.
"""
