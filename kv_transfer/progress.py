"""How far the KV of one request has come: announced by its exporter, or pulled by a puller.

layers
  ▲ ┌────────┬────────┬ ─ ─ ─ ─┐       Chunk after chunk of tokens, and of a chunk's layers one
  │ │        │        │        │       range after the other. So two numbers say all: the tokens
  │ │ chunk  │ chunk  ├────────┤       that are complete, and how many layers of the chunk
  │ │        │        │////////│       behind them are there.
  └─┴────────┴────────┴────────┴──► tokens
                  num_tokens   chunk_end
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class KvPart:
    """Tokens [first_token, end_token) in layers [first_layer, end_layer)."""

    first_token: int
    end_token: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        """Its layers."""
        return range(self.first_layer, self.end_layer)


class Progress:
    """The parts that have come so far, each where the one before it ended."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_tokens = 0  # complete, in all layers
        self._chunk_end = 0  # tokens [num_tokens, _chunk_end) are there in some layers:
        self._chunk_layers = 0  # in the first so many; 0: there is no such chunk

    def take(self, part: KvPart) -> None:
        """Add the next part.

        Raises:
            MalformedMessage: it does not begin where the last one ended.
        """
        fits = (part.first_token, part.first_layer) == (self.num_tokens, self._chunk_layers)
        is_whole = part.end_layer == self._num_layers
        if self._chunk_layers:  # only the chunk's last layers may come for fewer tokens at a time
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
        """What is missing until tokens [0, end_token) are there in the first `num_layers` layers.

        In order; `take` each of them. Nothing, where it would be no whole part: when the chunk that
        has begun was meant to end elsewhere, its remaining layers come all at once.
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
        """All that has come so far, in as few parts as there can be."""
        parts = [
            KvPart(0, self.num_tokens, 0, self._num_layers),
            KvPart(self.num_tokens, self._chunk_end, 0, self._chunk_layers),
        ]
        return [p for p in parts if p.first_token < p.end_token and p.first_layer < p.end_layer]
