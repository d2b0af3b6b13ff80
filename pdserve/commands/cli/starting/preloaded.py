"""All that nodes need, imported by the process that they are forked from.

The collector stays off there: it would look at all this again and again, which takes time, and
write to it, after which nodes would have copies of what they share.
"""

import gc

gc.disable()

from pdserve.commands.cli import node  # noqa: E402, F401
from pdserve.commands.cli.starting import forked  # noqa: E402, F401

gc.freeze()
