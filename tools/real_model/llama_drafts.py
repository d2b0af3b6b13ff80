"""llama.cpp's drafts from text, by its own server in this process, as JSON.

usage: llama_drafts.py MODEL KIND THREADS TOKENS, with lists of token ids as JSON on stdin, and
xllamacpp on the path. KIND is one of llama.cpp's; NONE: no drafts.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_CONTEXT = 2048


def main(model: str, kind: str, threads: str, tokens: str) -> None:
    """Answer one prompt after the other; print what each took."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.verbosity = _CONTEXT, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    kinds = llama.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    server = llama.Server(params)
    answers = []
    for prompt in json.load(sys.stdin):
        asked = {"prompt": prompt, "n_predict": int(tokens), "temperature": 0, "ignore_eos": True}
        timings = server.handle_completions(asked)["timings"]
        answers.append(
            {
                "tokens": timings["predicted_n"],
                "seconds": timings["predicted_ms"] / 1000,
                "drafted": timings.get("draft_n", 0),
                "accepted": timings.get("draft_n_accepted", 0),
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
