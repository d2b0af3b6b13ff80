"""Token masks for answers that must match a grammar, as input to the sampler.

Only the grammar's text is sent between nodes: an answer's position in its grammar follows from its
tokens, on whichever node they were sampled.
"""

from __future__ import annotations

from pdserve.engine.grammar.compiler import GrammarCompiler
from pdserve.engine.grammar.masks import TokenMasks
from pdserve.engine.grammar.progress import GrammarProgress

__all__ = ["GrammarCompiler", "GrammarProgress", "TokenMasks"]
