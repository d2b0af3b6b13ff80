"""Evaluates the model: greedy answers to questions that it has never seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.demo_model.batches import encode_document
from tools.demo_model.conversation import Conversation
from tools.demo_model.probes import Probe
from tools.demo_model.tokenizer import END, ROLE_TOKENS, token_id

MAX_NEW_TOKENS: Final = 200
_BATCH: Final = 64


@dataclass
class Score:
    """Number of answers of one skill, and how many were right."""

    num_asked: int = 0
    num_right: int = 0

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.num_right / self.num_asked


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Return the conversation up to its last answer, as the chat template renders it."""
    asked = Conversation(conversation.messages[:-1])
    ids = [token for token, _ in encode_document(tokenizer, asked)]
    return [*ids, token_id(tokenizer, ROLE_TOKENS["assistant"])]


@torch.no_grad()
def answer_all(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str | None]:
    """Answer greedily, in batches of prompts of equal length so that nothing needs padding.

    None stands for an answer that did not end by itself.
    """
    prompts = [prompt_ids(tokenizer, conversation) for conversation in conversations]
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    answers: list[str | None] = [None] * len(prompts)
    stop = token_id(tokenizer, END)
    for same_length in by_length.values():
        for start in range(0, len(same_length), _BATCH):
            chosen = same_length[start : start + _BATCH]
            batch = torch.tensor([prompts[i] for i in chosen])
            rows = _continue(model, batch, stop, max_new_tokens)
            for i, ids in zip(chosen, rows, strict=True):
                if stop in ids:
                    answers[i] = tokenizer.decode(ids[: ids.index(stop)])
    return answers


def _continue(
    model: LlamaForCausalLM, batch: torch.Tensor, stop: int, max_new_tokens: int
) -> list[list[int]]:
    """Return the greedy continuation of every row, until all have stopped."""
    ids = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    rows: list[list[int]] = ids[:, batch.shape[1] :].tolist()
    return rows


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    probes: Sequence[Probe],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> tuple[dict[str, Score], list[tuple[Probe, str | None]]]:
    """Score the model per skill, and return what it got wrong."""
    model.train(False)
    conversations = [probe.conversation for probe in probes]
    answers = answer_all(model, tokenizer, conversations, max_new_tokens)
    scores: dict[str, Score] = {}
    wrong: list[tuple[Probe, str | None]] = []
    for probe, answer in zip(probes, answers, strict=True):
        score = scores.setdefault(probe.skill, Score())
        score.num_asked += 1
        if answer is not None and probe.is_right(answer):
            score.num_right += 1
        else:
            wrong.append((probe, answer))
    return scores, wrong
