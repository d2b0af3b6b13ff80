"""Builds the blocks of one answer as it arrives, and the events about them."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.api.answer.sse import TextTemplate
from coordinator.api.messages.events import (
    BlockDelta,
    BlockStart,
    BlockStop,
    MoreInput,
    MoreText,
    MoreThinking,
    Signed,
    encoded,
)
from coordinator.api.messages.objects import Block, TextBlock, ThinkingBlock, ToolUseBlock
from coordinator.api.messages.signatures import signature
from coordinator.api.messages.tool_input import ToolInput
from coordinator.api.read.arguments import read_arguments
from coordinator.api.read.json_text import JsonReader
from coordinator.text.parts import CallPiece, Parts, Phase


class OutputBlocks:
    """The blocks of one answer. Content of another kind or phase than the open one's ends that.

    Args:
        make_call_id: makes ids of calls, in the form that the model's template accepts.
        shows_thinking: otherwise the client gets its signature alone.
    """

    def __init__(
        self, make_call_id: Callable[[int, CallPiece], str], *, shows_thinking: bool
    ) -> None:
        self.blocks: list[Block] = []
        self._make_call_id = make_call_id
        self._shows_thinking = shows_thinking
        self._open: Block | None = None
        self._text: list[str] = []  # of the open block
        self._phase: Phase | None = None  # of the last text
        self._text_delta: TextTemplate | None = None  # of the open block, if that is text
        self._input = ToolInput()  # of the open block, if that is a call

    def add(self, parts: Parts) -> list[bytes]:
        """Add what came next; return the events."""
        told: list[bytes] = []
        if parts.reasoning:
            told += self._add_thinking(parts.reasoning)
        if parts.content:
            told += self._add_text(parts.content, parts.phase)
        for call in parts.calls:
            told += self._add_call(call)
        return told

    def close(self, *, is_cut: bool = False) -> list[bytes]:
        """End the open block, if there is one; return the events.

        `is_cut`: the answer ends within a call.
        """
        block = self._open
        if block is None:
            return []
        told: list[bytes] = []
        if isinstance(block, ToolUseBlock):
            told += self._more_input(self._input.finish(is_cut=is_cut))
        text = "".join(self._text)
        self._open, self._text, self._text_delta = None, [], None
        match block:
            case TextBlock():
                block.text = text
            case ToolUseBlock():
                block.input = read_arguments(text, JsonReader())
            case ThinkingBlock():
                block.thinking = text if self._shows_thinking else ""
                block.signature = signature(text, is_shown=self._shows_thinking)
                told.append(self._delta(Signed(signature=block.signature)))
        return [*told, encoded(BlockStop(index=self._index))]

    # ---- parts ---------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _add_thinking(self, text: str) -> list[bytes]:
        told = [] if isinstance(self._open, ThinkingBlock) else self._begin(ThinkingBlock())
        self._text.append(text)
        if self._shows_thinking:
            told.append(self._delta(MoreThinking(thinking=text)))
        return told

    def _add_text(self, text: str, phase: Phase | None) -> list[bytes]:
        goes_on = isinstance(self._open, TextBlock) and self._phase == phase
        told = [] if goes_on else self._begin(TextBlock())
        self._phase = phase
        self._text.append(text)
        if self._text_delta is None:
            self._text_delta = TextTemplate(lambda text: self._delta(MoreText(text=text)))
        return [*told, self._text_delta.filled(text)]

    def _add_call(self, piece: CallPiece) -> list[bytes]:
        told: list[bytes] = []
        if piece.name is not None or not isinstance(self._open, ToolUseBlock):
            call_id = self._make_call_id(0, piece)
            told += self._begin(ToolUseBlock(id=call_id, name=piece.name or ""))
            self._input = ToolInput()
        return told + self._more_input(self._input.push(piece.arguments))

    def _more_input(self, text: str) -> list[bytes]:
        if not text:
            return []
        self._text.append(text)
        return [self._delta(MoreInput(partial_json=text))]

    def _begin(self, block: Block) -> list[bytes]:
        told = self.close()
        self._open = block
        self.blocks.append(block)
        return [*told, encoded(BlockStart(index=self._index, content_block=block))]

    def _delta(self, delta: MoreText | MoreThinking | Signed | MoreInput) -> bytes:
        return encoded(BlockDelta(index=self._index, delta=delta))
