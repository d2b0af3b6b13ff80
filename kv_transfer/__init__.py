"""KV transfer: all KV moves by pulling blocks that a ticket names, validated after reading.

    memory.py       the pool as exported memory, and somebody else's pool mapped read-only
    cuda/           the same on a GPU
    ticket.py       what names the blocks: sealed by the exporter, opaque to everybody between
    handshake.py    who may pull from whom: same model, layouts that a plan can reconcile
    access.py       who may use the transports: whoever has an open session
    plan.py         pure: two layouts + block ids + a box of KV |-> spans to copy
    progress.py     pure: which parts of a prompt's KV have been announced, or pulled
    lifecycle.py    the legal moves of an exporter's and of a puller's block
    exporter.py     the side that has the blocks: issues tickets, serves transports
    puller.py       the side that needs them: plans, pulls, validates
    link.py         a puller's way to one exporter: picks a transport, and another when it breaks
    checksum.py     whether what has arrived is what was ticketed, whatever the layouts
    tier.py         a second home for prefix blocks, in files
    transports/     the means of moving bytes, behind one interface

Knows layouts and memory, not models, engines or the cluster's messages.
"""
