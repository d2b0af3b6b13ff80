"""Drafts from text: what followed where a text read before as a stream's end does.

The texts are the stream's own, the answer that its client expects, and former answers of its
tenant. An index is asked at each step, so it is no object of Python's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal, Protocol

from pdserve import _native
from pdserve.engine.drafts.source import Drafter, Source
from pdserve.engine.request import Request

# Of a prompt's end before an answer: the answer's first tokens are then found, too.
_BEFORE: Final = 32
_MOST_OF_ANSWER: Final = 8192  # tokens that are kept of one; adding them takes a millisecond
_MOST_OF_TENANT: Final = 1 << 18  # tokens, of 12 bytes
_MOST_BYTES: Final = 1 << 27  # of all tenants


class Texts(Source, Protocol):
    """A source that keeps texts."""

    @property
    def name(self) -> Literal["text", "prediction", "answers"]:
        """As Source.name."""

    @property
    def num_bytes(self) -> int:
        """Memory that it uses."""


class OwnText:
    """A stream's own prompt and output. Implements `Source`."""

    name: Final = "text"

    def __init__(self) -> None:
        self._texts: dict[Request, _native.OwnText] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all streams' indexes, of 12 to 24 bytes a token."""
        return sum(text.num_bytes for text in self._texts.values())

    def drafter(self, request: Request) -> _native.OwnText:
        """As Source.drafter."""
        text = self._texts[request] = _native.OwnText()
        return text

    def ended(self, request: Request) -> None:
        """As Source.ended."""
        self._texts.pop(request, None)


class Predictions:
    """What clients expect to be answered. Implements `Source`."""

    name: Final = "prediction"

    def __init__(self) -> None:
        self._texts: dict[Request, _native.OtherTexts] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all streams' predictions, which are no longer than the longest request."""
        return sum(texts.num_bytes for texts in self._texts.values())

    def drafter(self, request: Request) -> Drafter | None:
        """As Source.drafter."""
        if not request.prediction:
            return None
        text = [*request.prompt_token_ids[-_BEFORE:], *request.prediction]
        texts = self._texts[request] = _native.OtherTexts(len(text) + 1)
        texts.add(text)
        return texts

    def ended(self, request: Request) -> None:
        """As Source.ended."""
        self._texts.pop(request, None)


class FormerAnswers:
    """Former answers on this node, to prompts of the same tenant and salt. Implements `Source`.

    Without tenants there are none: nobody is to learn from the time of an answer what others were
    told. The oldest answers of a tenant are written over, and tenants that were not here for the
    longest time are forgotten first.
    """

    name: Final = "answers"

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """`most_bytes`: of memory, for all tenants."""
        self.num_bytes = 0  # that are used
        self._most_bytes = most_bytes
        self._texts: OrderedDict[tuple[str, str], _native.OtherTexts] = OrderedDict()

    def drafter(self, request: Request) -> Drafter | None:
        """As Source.drafter."""
        return self._of(request)

    def ended(self, request: Request) -> None:
        """As Source.ended: keep its answer, unless another node goes on with it."""
        texts = None if request.is_prefill_leg else self._of(request)
        if texts is None or not request.output_token_ids:
            return
        self.num_bytes -= texts.num_bytes
        answer = request.output_token_ids[:_MOST_OF_ANSWER]
        texts.add([*request.prompt_token_ids[-_BEFORE:], *answer])
        self.num_bytes += texts.num_bytes
        self._shrink()

    def _of(self, request: Request) -> _native.OtherTexts | None:
        tenant = request.targets.tenant
        if not tenant:
            return None
        key = tenant, request.prompt.cache_salt
        texts = self._texts.get(key)
        if texts is None:
            texts = self._texts[key] = _native.OtherTexts(_MOST_OF_TENANT)
            self.num_bytes += texts.num_bytes
            self._shrink()
        else:
            self._texts.move_to_end(key)
        return texts

    def _shrink(self) -> None:
        while self.num_bytes > self._most_bytes:
            _, oldest = self._texts.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
