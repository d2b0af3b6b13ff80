"""Which tokens may come next in answers that must match a grammar, as masks for the sampler.

Nothing of it crosses the wire but the grammar's text: where an answer stands in its grammar follows
from its tokens, on whichever node they were sampled.
"""

from __future__ import annotations

from pdserve.engine.grammar.masks import TokenMasks
from pdserve.engine.grammar.progress import GrammarProgress, no_vocabulary

__all__ = ["GrammarProgress", "TokenMasks", "no_vocabulary"]
