"""The prefix store: blocks of KV that outlive their nodes, below the host tiers of all of them.

    blobs.py      what a store is made of: named bytes, here in a folder
    objects.py    the same in an object store
    entry.py      a block as such bytes, with what it is and its sum, and its name
    eviction.py   which blocks leave a store that is full
    erasure.py    how what belongs to one tenant leaves it

Every call here blocks, and may hang as a network file system does: the threads are the caller's.
"""
