"""Which parts of one request's KV have been announced by its exporter, or pulled by a puller.

layers
  ▲ ┌────────┬────────┬ ─ ─ ─ ─┐       KV comes chunk by chunk of tokens, and within a chunk
  │ │        │        │        │       by ascending ranges of layers. So two numbers suffice: the
  │ │ chunk  │ chunk  ├────────┤       tokens that are complete, and the number of layers of
  │ │        │        │////////│       the next chunk.
  └─┴────────┴────────┴────────┴──► tokens
                  num_tokens   chunk_end
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.shared.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class KvPart:
    """Tokens [first_token, end_token) in layers [first_layer, end_layer)."""

    first_token: int
    end_token: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        """The layers as a range."""
        return range(self.first_layer, self.end_layer)

    def pieces(self, max_tokens: int) -> list[KvPart]:
        """The same KV in parts of at most so many tokens."""
        begins = range(self.first_token, self.end_token, max_tokens)
        ends = [*begins[1:], self.end_token]
        return [
            replace(self, first_token=begin, end_token=end)
            for begin, end in zip(begins, ends, strict=True)
        ]


class Progress:
    """The parts so far, each of which begins where the one before it ended."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_tokens = 0  # complete, in all layers
        self._chunk_end = 0  # tokens [num_tokens, _chunk_end) are there in the first
        self._chunk_layers = 0  # layers, that is this many; 0: there is no such chunk

    def take(self, part: KvPart) -> None:
        """Add the next part.

        Raises:
            MalformedMessage: it does not begin where the one before it ended.
        """
        fits = (part.first_token, part.first_layer) == (self.num_tokens, self._chunk_layers)
        is_whole = part.end_layer == self._num_layers
        if self._chunk_layers:  # the rest of a chunk comes whole, or shorter if a step was repeated
            is_chunk = part.end_token == self._chunk_end
            fits &= is_chunk or (is_whole and part.end_token < self._chunk_end)
        if not fits:
            raise MalformedMessage(
                f"after {self.num_tokens} tokens and {self._chunk_layers} layers of those up to "
                f"{self._chunk_end} came KV of tokens {part.first_token}..{part.end_token}, "
                f"layers {part.first_layer}..{part.end_layer}"
            )
        if not is_whole:
            self._chunk_end, self._chunk_layers = part.end_token, part.end_layer
            return
        self.num_tokens = part.end_token
        if self.num_tokens >= self._chunk_end:
            self._chunk_layers = 0

    def until(self, end_token: int, num_layers: int) -> list[KvPart]:
        """The parts that are missing of tokens [0, end_token) in the first `num_layers` layers.

        They are in order; `take` each of them. If the current chunk was begun with another end, its
        remaining layers can only come all at once, so with fewer layers there is no part.
        """
        is_whole = num_layers == self._num_layers
        if self._chunk_layers and not is_whole and end_token != self._chunk_end:
            return []
        parts = []
        begin = self.num_tokens
        if self._chunk_layers:
            end = min(end_token, self._chunk_end)
            parts.append(KvPart(begin, end, self._chunk_layers, num_layers))
            begin = end
        parts.append(KvPart(begin, end_token, 0, num_layers))
        return [p for p in parts if p.first_token < p.end_token and p.first_layer < p.end_layer]

    def whole(self) -> list[KvPart]:
        """Everything so far, in as few parts as possible."""
        parts = [
            KvPart(0, self.num_tokens, 0, self._num_layers),
            KvPart(self.num_tokens, self._chunk_end, 0, self._chunk_layers),
        ]
        return [p for p in parts if p.first_token < p.end_token and p.first_layer < p.end_layer]
