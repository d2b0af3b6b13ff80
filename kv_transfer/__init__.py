"""KV transfer: KV moves by pulling blocks that a ticket names, and validating what was read.

    memory.py       the pool as memory that other processes can map, and their view of it
    cuda/           the same on a GPU
    ticket.py       tickets: name the blocks; sealed by the exporter
    handshake.py    who can pull from whom: same model, compatible layouts
    access.py       who may use the transports: pullers with an open session
    plan.py         pure: two layouts + block ids + a box of KV |-> spans to copy
    pieces.py       pure: spans cut into pieces
    progress.py     pure: which parts of a prompt's KV have been announced, or pulled
    lifecycle.py    the states of an exporter's and of a puller's block, and the legal moves
    exporter.py     the side that has the blocks: issues tickets, serves transports
    puller.py       the side that needs them: plans, pulls, validates
    link.py         a puller's link to one exporter: chooses a transport, and changes it on failure
    checksum.py     checksums that are independent of the layouts
    tier.py         the host tier: a second cache of prefix blocks, in a file
    threads.py      threads for copying, which are never left behind
    lone_thread.py  a thread for calls that may never return
    transports/     the ways of moving bytes, behind one interface

It knows layouts and memory, but not models, engines, or the cluster's RPCs.
"""
