"""A node's side of the prefix store (`kv_transfer/store`), which may be slow, full, or gone.

tier ──stored──► writes ──thread──► store          store ──threads──► reads ──► tier ──► pool

node_store.py   the store as a node sees it
index.py        which blocks it has, and whose those of this node are
writes.py       what the tier holds goes there, in the background
reads.py        what a prompt needs comes from there, as long as that is no loss
upkeep.py       looks at it now and then: what others have written, what has to leave
"""
