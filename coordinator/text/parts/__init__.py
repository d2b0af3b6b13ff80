"""Separates a chat answer into text, reasoning and tool calls while it arrives."""

from coordinator.text.parts.answer import AnswerParts
from coordinator.text.parts.catalog import ToolFormat, detect_tool_format
from coordinator.text.parts.interface import CallPiece, Parts, Phase

__all__ = ["AnswerParts", "CallPiece", "Parts", "Phase", "ToolFormat", "detect_tool_format"]
