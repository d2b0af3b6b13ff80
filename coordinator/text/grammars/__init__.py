"""Builds and checks the grammar of an answer, which nodes enforce (pdserve/grammar)."""

from coordinator.text.grammars.answer import AnswerGrammar, Thinking
from coordinator.text.grammars.calls import CallGrammar, OfferedTool
from coordinator.text.grammars.checker import GrammarChecker
from coordinator.text.grammars.outputs import Output, OutputKind

__all__ = [
    "AnswerGrammar",
    "CallGrammar",
    "GrammarChecker",
    "OfferedTool",
    "Output",
    "OutputKind",
    "Thinking",
]
