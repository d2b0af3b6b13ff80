"""What KV costs: the layout of a paged pool, and how many blocks tokens take. No torch.

plane.py    what one token costs in one kind of KV: keys, values
layout.py   a pool's planes in blocks; what two nodes compare when they connect
companions.py  which layers' KV is given back once their windows have passed it
savings.py  what codes of 8 bits would save
need.py     blocks and tokens: the only arithmetic of the two
"""

from pdserve.kv import need
from pdserve.kv.layout import KvDtype, KvLayout
from pdserve.kv.plane import Plane

__all__ = ["KvDtype", "KvLayout", "Plane", "need"]
