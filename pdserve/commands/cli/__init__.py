"""The `pdserve` command: runs processes and clusters, inspects them, and runs benchmarks.

Only `main` and the config structs are imported for every command. Each command imports
what it needs, so that a coordinator that is started from here does not load torch.
"""
