"""Builds and checks the grammar of an answer, which nodes enforce (pdserve/grammar)."""

from coordinator.text.grammars.answer import AnswerGrammar, Channels, Thinking
from coordinator.text.grammars.calls import CallGrammar, OfferedTool
from coordinator.text.grammars.checker import GrammarChecker
from coordinator.text.grammars.outputs import Output, OutputKind

__all__ = [
    "AnswerGrammar",
    "CallGrammar",
    "Channels",
    "GrammarChecker",
    "OfferedTool",
    "Output",
    "OutputKind",
    "Thinking",
]
