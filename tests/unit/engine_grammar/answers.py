"""The demo model answering under grammars, in a whole batch at a time, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from tokenizers import Tokenizer

from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.request import Request, Scheduled, finish
from pdserve.grammar import compile_grammar, load_vocabulary
from pdserve.protocol import FinishReason
from tests.requests import make_request
from tests.unit.engine_model.harness import Node

MAX_TOKENS = 160
PROMPT = "<|bos|><|user|>Tell me about the sea.<|end|><|assistant|>"


class DemoModel:
    """Of what it says, text and whether it said all."""

    def __init__(self, node: Node | None = None) -> None:
        """`node`: of the same vocabulary; None: the plain one."""
        self.node = node or Node.load(CHECKPOINT_PATH, num_tokens=16384)
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT_PATH / "tokenizer.json"))
        self._prompt = self.ids(PROMPT)
        self.eos = self.node.model.config.eos_token_ids
        self.vocabulary = load_vocabulary(CHECKPOINT_PATH, 2048, self.eos)
        self._compile = cache(partial(compile_grammar, self.vocabulary))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def request(self, grammar: str, seed: int, request_id: str, **sampling: object) -> Request:
        wanted = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": seed} | sampling
        request = make_request(self._prompt, request_id=request_id, grammar=grammar, **wanted)
        request.grammar = self._compile(grammar) if grammar else None
        return request

    def run(self, requests: Sequence[Request]) -> None:
        """To their ends, which are reached at different times."""
        while running := [r for r in requests if r.finish_reason is None]:
            self.step(running)

    def step(self, requests: Sequence[Request]) -> None:
        self.node.step([Scheduled(r, r.num_uncomputed_tokens) for r in requests])
        for request in requests:
            finish(request, self.eos)
            if request.is_done:
                self.node.free += request.block_table
                request.block_table = []

    def text(self, request: Request) -> str:
        """Without the token that ended it."""
        ids = request.output_token_ids
        return self.tokenizer.decode(ids[:-1] if self.is_whole(request) else ids)

    def is_whole(self, request: Request) -> bool:
        return request.finish_reason is FinishReason.STOP
