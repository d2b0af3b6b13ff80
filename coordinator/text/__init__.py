"""Text on the coordinator: tokenizer, chat template, incremental detokeniser, stop strings.

This package knows nothing of HTTP or nodes, and does not import torch or transformers: a
checkpoint's `tokenizer.json` and `tokenizer_config.json` are enough.
"""

from coordinator.templates.template import ChatTemplate, TemplateInput
from coordinator.text.detokenizer import IncrementalDetokenizer, StopMatcher
from coordinator.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "TemplateInput", "Tokenizer"]
