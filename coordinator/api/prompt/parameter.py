"""The prompt parameter's four forms: a text, token ids, several texts, lists of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.api.prompt.fit import check_num_chars
from coordinator.text import Tokenizer
from coordinator.text.threads import Asker
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

Given = str | list[int]  # one prompt, as the client gave it
_MANY_IDS = 2**16  # to check in one turn of the event loop: about two milliseconds


@dataclass(frozen=True, slots=True)
class PromptParameter:
    """An endpoint's parameter for one or more prompts."""

    name: str
    max_prompts: int  # in one request

    def split(self, prompt: Any, max_model_len: int) -> list[Given]:
        """Split the parameter into prompts. Raises InvalidRequest or ContextLengthExceeded."""
        name = self.name
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if len(prompt) > max(max_model_len, self.max_prompts):
                raise ContextLengthExceeded(
                    f"{name!r} has {len(prompt)} items, but this model's maximum context length is "
                    f"{max_model_len} tokens",
                    name,
                )
            if _is_ids(prompt):
                return [prompt]
            if len(prompt) > self.max_prompts:
                raise InvalidRequest(
                    f"{name!r} has {len(prompt)} prompts, but a request can have at most "
                    f"{self.max_prompts}",
                    name,
                )
            for one in prompt:
                if isinstance(one, list) and len(one) > max_model_len:
                    raise ContextLengthExceeded(
                        f"a prompt in {name!r} has {len(one)} token ids, but this model's maximum "
                        f"context length is {max_model_len} tokens",
                        name,
                    )
            if all(isinstance(one, str) or _is_ids(one) for one in prompt):
                return prompt
        raise InvalidRequest(
            f"{name!r} must be a string, a list of strings, a list of token ids or a list of such "
            "lists",
            name,
        )

    async def encode(
        self,
        prompts: Sequence[Given],
        tokenizer: Tokenizer,
        asker: Asker,
        *,
        add_special_tokens: bool,
        max_model_len: int,
        is_truncated: bool,
    ) -> list[list[int]]:
        """Return the token ids of each prompt, at least one id each.

        Those that are to be truncated may have more than `max_model_len`. Raises InvalidRequest or
        ContextLengthExceeded.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            check_num_chars(len(text), tokenizer, max_model_len, self.name)
        encoded = iter(
            await tokenizer.encode_texts(
                texts,
                asker,
                add_special_tokens=add_special_tokens,
                max_tokens=None if is_truncated else max_model_len,
            )
        )
        found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        num_checked = 0
        for token_ids in found:
            if not token_ids:
                raise InvalidRequest(
                    f"{self.name!r} must not be empty: at least one token is needed", self.name
                )
            tokenizer.check_ids(token_ids, self.name)
            num_checked += len(token_ids)
            if num_checked > _MANY_IDS:
                num_checked = 0
                await asyncio.sleep(0)  # others get their turns, too
        return found


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and set(map(type, prompt)) <= {int}
