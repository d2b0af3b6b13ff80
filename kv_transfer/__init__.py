"""KV transfer: KV moves by pulling blocks that a ticket names, and validating what was read.

The two sides:

    exporter.py       the side that has the blocks: issues tickets, serves transports
    puller.py         the side that needs them: reads tickets, pulls
    strand_pull.py    what a pull reads of one exporter's part: plans, reads, checks
    links/            a puller's link to one exporter: chooses a transport, changes it on failure
    transports/       the ways of moving bytes, behind one interface
    codecs/           forms in which bytes pass a slow network

Who may pull what:

    handshake.py      which nodes can pull from each other, and which have an open session
    ticket.py         tickets: name the blocks; sealed by the exporter
    lifecycle.py      which parts of a prompt's KV have been announced, or pulled; the states of an
                      exporter's and of a puller's block, and the legal moves

Pure arithmetic:

    spans/            which KV is to be moved, between which layouts, and the bytes to copy for it

Memory and threads:

    memory.py         the pool as memory that other processes can map, their view of it, and whether
                      what was read is what the ticket names
    cuda/             the same on a GPU
    sharded_pool.py   a pool in parts, one on each of a node's GPUs
    hosts/            parts of a pool that are on other hosts of the node
    host.py           which processes can share memory
    checksum.py       checksums that add up, whatever the layouts
    tier.py           the host tier: a second cache of prefix blocks, outside of the pool
    threads.py        threads for copying, which are never left behind
    lone_thread.py    a thread for calls that may never return
    statistics.py     counters of both sides

It knows layouts and memory, but not models, engines, or the cluster's RPCs.
"""
