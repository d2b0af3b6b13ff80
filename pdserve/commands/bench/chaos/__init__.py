"""`pdserve bench chaos`: calls while processes are killed, stopped, drained and cut off.

config.py        settings
calls.py         the kinds of calls, each made from a seed, and what a client hears of one
histories.py     what was heard, judged against the same calls undisturbed
adapters.py      the adapters that calls name, which come and go
faults.py        the kinds of faults
relay.py         the network between a node and the coordinator: slow, cut or silent
hosts.py         hosts for the nodes, as network namespaces, which can lose each other
stopped_thread.py  one thread of a node stands still
site.py          the cluster's processes on these hosts
measurement.py   the run: references, calls under faults, and what is left afterwards
run.py           the cluster and the table
"""
