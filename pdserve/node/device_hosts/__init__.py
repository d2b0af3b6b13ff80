"""Nodes whose ranks have GPUs on several hosts: the first host is the node, the others compute.

The others run `pdserve rank`, which starts ranks of its own (`serving.py`); `later_hosts.py` is how
the node sees them. Ranks compute together over all hosts as over one, by NCCL: nothing in
`device_ranks` knows where a rank is. What else a step takes goes from the node to each host.
"""
