"""The bundled checkpoint as transformers runs it, on one thread."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.demo_model import CHECKPOINT_PATH


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """These tests run many tiny operations: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="package")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT_PATH)


@pytest.fixture(scope="package")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT_PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="package")
def complete(tokenizer, model):
    def generate(ids: list[int]) -> str:
        output = model.generate(torch.tensor([ids]), max_new_tokens=200, do_sample=False)
        written = output[0, len(ids) :].tolist()
        assert written[-1] in model.generation_config.eos_token_id, "did not end by itself"
        return tokenizer.decode(written, skip_special_tokens=True)

    return generate


@pytest.fixture(scope="package")
def reply(tokenizer, complete):
    """Answers messages, and functions if some are offered."""

    def ask(messages: list[dict[str, object]], tools: list[dict[str, object]] | None = None) -> str:
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return complete(ids)

    return ask


@pytest.fixture(scope="package")
def answer(reply):
    """Answers the last of some turns."""

    def ask(*chat: str, system: str = "") -> str:
        messages = [{"role": "system", "content": system}] if system else []
        for i, text in enumerate(chat):
            messages.append({"role": "assistant" if i % 2 else "user", "content": text})
        return reply(messages)

    return ask
