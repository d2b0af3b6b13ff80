"""How often the model is right: greedy answers to questions it has never seen."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from pdserve.demo_model import arithmetic, questions, smalltalk, stories, words
from pdserve.demo_model.batches import encode_document
from pdserve.demo_model.corpus import BRIEF, Conversation, dialogue, draw_exchange
from pdserve.demo_model.exchange import Exchange, Skill, draw, draw_pair
from pdserve.demo_model.relations import RELATIONS
from pdserve.demo_model.tokenizer import END, ROLE_TOKENS, token_id

MAX_NEW_TOKENS: Final = 200
_BATCH: Final = 64
_OPEN_SKILLS: Final[tuple[Skill, ...]] = (
    arithmetic.addition,
    arithmetic.subtraction,
    arithmetic.times_table,
    arithmetic.division,
    arithmetic.word_problem,
    arithmetic.comparison,
    words.spelling,
    words.reversing,
    words.length,
    words.first_or_last,
    stories.story,
    smalltalk.beyond_reach,
    smalltalk.nonsense,
    smalltalk.too_large,
)
"""Skills with plenty of held-out exchanges; the tables of facts have fewer."""


@dataclass(frozen=True)
class Probe:
    """A conversation whose last answer is examined."""

    skill: str
    conversation: Conversation
    exchange: Exchange


@dataclass
class Score:
    """Answers of one skill, and how many of them were right."""

    num_asked: int = 0
    num_right: int = 0

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.num_right / self.num_asked


def _single(exchange: Exchange) -> Probe:
    return Probe(exchange.skill, dialogue([exchange]), exchange)


def held_out_probes(seed: int, num_per_skill: int) -> list[Probe]:
    """Draw different conversations, each ending with a question that no run was trained on.

    Names, small talk and system messages come from closed lists, so what is held out of those
    probes is the combination.
    """
    rng = random.Random(seed)
    probes = [
        _single(draw(skill, rng, held_out=True))
        for skill in _OPEN_SKILLS
        for _ in range(num_per_skill)
    ]
    probes += [
        _single(draw(relation, rng, held_out=True))
        for relation in RELATIONS
        for _ in range(max(1, num_per_skill // 5))
    ]
    for _ in range(num_per_skill):
        told, asked = smalltalk.introduction(rng)
        probes.append(Probe("memory", dialogue([told, draw_exchange(rng), asked]), asked))
        pair = draw_pair(questions.follow_up, rng, held_out=True)
        probes.append(Probe("follow-up", dialogue(pair), pair[1]))
        brief = draw(rng.choice(RELATIONS), rng, held_out=True)
        conversation = dialogue([brief], rng.choice(BRIEF), is_brief=True)
        probes.append(Probe("brief answers", conversation, brief))
        probes.append(_single(smalltalk.small_talk(rng)))
    return list({probe.conversation: probe for probe in probes}.values())


def is_right(probe: Probe, answer: str) -> bool:
    """Return whether the answer is the expected one, or any good story about the subject."""
    if probe.skill == "story":
        return stories.answers_request(answer, probe.exchange.question)
    return answer == probe.conversation.messages[-1].text


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
    output = model(input_ids=batch, use_cache=True)
    written: list[torch.Tensor] = []
    has_stopped = torch.zeros(len(batch), dtype=torch.bool)
    for _ in range(max_new_tokens):
        token = output.logits[:, -1].argmax(-1)
        written.append(token)
        has_stopped |= token == stop
        if bool(has_stopped.all()):
            break
        output = model(
            input_ids=token[:, None], past_key_values=output.past_key_values, use_cache=True
        )
    rows: list[list[int]] = torch.stack(written, dim=1).tolist()
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
        if answer is not None and is_right(probe, answer):
            score.num_right += 1
        else:
            wrong.append((probe, answer))
    return scores, wrong
