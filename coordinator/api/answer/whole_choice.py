"""One choice of a text completion that is not streamed, while its content comes in.

Log-probabilities are encoded as they come: encoding all of a long answer at the end would hold the
event loop, and until then they would be hundreds of thousands of objects.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from coordinator.api.answer.bodies import CompletionChoice, CompletionLogprobs


class WholeChoice:
    """Adds up the contents of one choice."""

    def __init__(self) -> None:
        self.prompt_logprobs: list[Raw] | UnsetType = UNSET
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        self._columns: dict[str, list[bytes]] | None = None  # name |-> items as JSON
        self._last: CompletionChoice | None = None

    def add(self, more: CompletionChoice) -> None:
        """Add what came next; the end comes with the last."""
        self._texts.append(more.text)
        if more.token_ids is not UNSET:
            self._token_ids += more.token_ids
        if self._last is None:
            self._prompt_token_ids = more.prompt_token_ids
        if isinstance(more.logprobs, CompletionLogprobs):
            self._add_columns(more.logprobs)
        self._last = more

    def complete(self) -> CompletionChoice:
        """Return the choice with all its content."""
        choice = self._last
        assert choice is not None, "content was added"
        choice.text = "".join(self._texts)
        choice.prompt_logprobs = self.prompt_logprobs
        choice.prompt_token_ids = self._prompt_token_ids
        if choice.token_ids is not UNSET:
            choice.token_ids = self._token_ids
        if self._columns is not None:
            members = (
                b'"%b":[%b]' % (name.encode(), b",".join(items))
                for name, items in self._columns.items()
            )
            choice.logprobs = Raw(b"{%b}" % b",".join(members))
        return choice

    def _add_columns(self, more: CompletionLogprobs) -> None:
        columns = self._columns
        if columns is None:
            columns = self._columns = {name: [] for name in more.__struct_fields__}
        for name, items in columns.items():
            if new := getattr(more, name):
                items.append(msgspec.json.encode(new)[1:-1])  # without its brackets
