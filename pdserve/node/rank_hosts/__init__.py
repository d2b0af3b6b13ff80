"""Nodes over several hosts of CPUs: each has some of the stages, and all talk in one chain.

The first host is the node; the others run `pdserve rank`, which `server.py` is. What stands for the
next host among a host's own ranks is `carrier.py`, and `stand_in.py` for the one before. Adapters
go from host to host beside the steps (`adapters.py`). Who may have a later host for itself, one
node after another, is decided at its `door.py`.

The first host's pool has the KV of all layers, so to other nodes the node is as any other. A later
host has the layers of itself and of those behind it: it is sent what it lacks (`lacking.py`) with
the step that needs it, and sends back what it has computed.
"""
