"""KV transfer: all KV moves by pulling blocks that a ticket names, validated after reading.

    memory.py      the pool as exported memory, and somebody else's pool mapped read-only
    ticket.py      what names the blocks: sealed by the exporter, opaque to everybody between
    handshake.py   who may pull from whom: same model, layouts that a plan can reconcile
    plan.py        pure: two layouts + block ids + token range |-> spans to copy
    exporter.py    the side that has the blocks: issues tickets, serves transports
    puller.py      the side that needs them: picks a transport, pulls, validates
    transports/    one file per means of moving bytes, behind one interface

Knows layouts and memory, not models, engines or the cluster's messages.
"""
