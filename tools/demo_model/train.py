"""Train the demo model from nothing: `python -m tools.demo_model.train`.

Text is generated, a tokenizer learned from it, a small Llama trained on it (float32 weights, with
the matrix products in bfloat16 where the CPU is faster at that), its weights rounded to bfloat16
and, so rounded, examined on questions that were held out. The same seed gives the same run on the
same machine and number of threads. `--draft` trains its draft model, of the same tokenizer.
"""

import argparse
import itertools
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from pdserve import _native
from pdserve.demo_model import CHECKPOINT_PATH, DRAFT_PATH
from tools.demo_model import checkpoint_files, corpus, evaluate
from tools.demo_model.batches import PackedRows
from tools.demo_model.probes import held_out_probes
from tools.demo_model.tokenizer import VOCAB_SIZE, document_texts, train_tokenizer

_log = logging.getLogger("tools.demo_model.train")

_ROW_LENGTHS: Final = (256, 256, 256, 256, 512, 512, 1024)
"""Mostly short rows, which are cheap; some long ones, so that long chats work too."""
_EVALUATION_SEED: Final = 2_000_000_000


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a training run."""

    seed: int = 0
    num_steps: int = 14_000
    tokens_per_step: int = 1024
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    limit_s: float = math.inf
    """Training time after which the learning rate ends, even if steps are left."""
    vocab_size: int = VOCAB_SIZE
    num_tokenizer_documents: int = 20_000
    num_questions: int = 150
    """Held-out questions per skill in the final evaluation."""
    max_new_tokens: int = evaluate.MAX_NEW_TOKENS
    """Longest answer in the evaluation; longer ones count as wrong."""


DRAFT_STEPS: Final = 6_000


def learning_rate(plan: TrainingPlan, step: int, progress: float) -> float:
    """Rise linearly, then fall as a half cosine to a fiftieth of the peak."""
    if step < plan.warmup_steps:
        return plan.peak_rate * (step + 1) / plan.warmup_steps
    return plan.peak_rate * (0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0))))


def loss_on(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross entropy of the next token."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    targets, target_weights = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    return (losses * target_weights).sum() / target_weights.sum()


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones."""
    return _native.cpu_features().get("avx512_bf16", False)


def _optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the gains.

    With AdamW alone the same number of steps leaves two-digit sums far from learned. The matched
    scale lets both take the same learning rate.
    """
    layers = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in layers}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            layers,
            lr=plan.peak_rate,
            weight_decay=plan.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        ),
    ]


def _step_at(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def fit(model: LlamaForCausalLM, rows: PackedRows, plan: TrainingPlan) -> tuple[int, float]:
    """Train until the steps or the time are used up; return steps done and the last mean loss."""
    optimizers = _optimizers(model, plan)
    rng = random.Random(plan.seed)
    started_s = time.monotonic()
    mean_loss = math.nan
    model.train()
    for step in range(plan.num_steps):
        elapsed_s = time.monotonic() - started_s
        progress = max(step / plan.num_steps, elapsed_s / plan.limit_s)
        if progress >= 1.0:
            return step, mean_loss
        rate = learning_rate(plan, step, progress)
        length = min(rng.choice(_ROW_LENGTHS), plan.tokens_per_step)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bfloat16()):
            loss = loss_on(model, *rows.take(plan.tokens_per_step // length, length))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            _step_at(optimizer, rate)
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 200 == 0 or step == plan.num_steps - 1:
            _log.info("step %5d  loss %.4f  %4.0f s", step, mean_loss, elapsed_s)
    return plan.num_steps, mean_loss


def train(
    plan: TrainingPlan,
    folder: Path,
    shape: dict[str, int] = checkpoint_files.SHAPE,
    tokenizer: Tokenizer | None = None,
) -> dict[str, evaluate.Score]:
    """Run the plan, write the checkpoint with its evaluation, and return the scores.

    `tokenizer`: that of another model; None: it is learned, too.
    """
    torch.manual_seed(plan.seed)
    if tokenizer is None:
        sample = itertools.islice(corpus.documents(plan.seed), plan.num_tokenizer_documents)
        tokenizer = train_tokenizer(document_texts(sample), plan.vocab_size)
    model = checkpoint_files.new_model(tokenizer, shape)
    _log.info("%d parameters, vocabulary %d", model.num_parameters(), tokenizer.get_vocab_size())
    started_s = time.monotonic()
    num_steps, loss = fit(model, PackedRows(tokenizer, corpus.documents(plan.seed + 1)), plan)
    minutes = (time.monotonic() - started_s) / 60
    checkpoint_files.round_to_bfloat16(model)
    checkpoint_files.save_checkpoint(model, tokenizer, shape, folder)
    probes = held_out_probes(_EVALUATION_SEED, plan.num_questions)
    scores, wrong = evaluate.evaluate(model, tokenizer, probes, plan.max_new_tokens)
    for probe, answer in wrong:
        _log.debug("%s: %s -> %s", probe.skill, probe.question, answer)
    _report(plan, folder, scores, {"steps": num_steps, "loss": loss, "minutes": minutes})
    return scores


def _report(
    plan: TrainingPlan, folder: Path, scores: dict[str, evaluate.Score], run: dict[str, float]
) -> None:
    """Log the accuracy of every skill and write it beside the weights."""
    for skill, score in sorted(scores.items()):
        _log.info("%-15s %4d/%-4d %.3f", skill, score.num_right, score.num_asked, score.accuracy)
    contents = {
        "plan": {k: v for k, v in asdict(plan).items() if v != math.inf},
        "run": {name: round(value, 4) for name, value in run.items()},
        "held_out_accuracy": {
            skill: {"asked": score.num_asked, "accuracy": round(score.accuracy, 4)}
            for skill, score in sorted(scores.items())
        },
    }
    checkpoint_files.write_json(folder / "evaluation.json", contents)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--draft", action="store_true", help="train the draft model instead")
    parser.add_argument("--out", type=Path, help="folder to write, unless it is the bundled one")
    parser.add_argument("--steps", type=int, help="batches to learn from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use")
    parser.add_argument("--verbose", action="store_true", help="log the wrong answers as well")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _log.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    torch.set_num_threads(options.threads)
    shape = checkpoint_files.DRAFT_SHAPE if options.draft else checkpoint_files.SHAPE
    steps = options.steps or (DRAFT_STEPS if options.draft else TrainingPlan.num_steps)
    plan = TrainingPlan(seed=options.seed, num_steps=steps, limit_s=options.minutes * 60)
    tokenizer = None
    if options.draft:
        tokenizer = Tokenizer.from_file(str(CHECKPOINT_PATH / "tokenizer.json"))
    bundled = DRAFT_PATH if options.draft else CHECKPOINT_PATH
    train(plan, options.out or bundled, shape, tokenizer)


if __name__ == "__main__":
    main()
