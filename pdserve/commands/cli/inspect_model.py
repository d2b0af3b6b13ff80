"""`pdserve inspect`: what a file, a folder or a hub model is, and whether it would be served.

It says why not in the words of `pdserve up`, since it asks the same functions. What does not depend
on the reason is said all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.recognise import recognise
from pdserve.shared.errors import PdserveError
from pdserve.shared.process.exit_codes import FAILED, OK


def run(model: str, revision: str | None) -> int:
    """Print what is known of it; the exit code says whether it is served."""
    reasons: list[str] = []
    for what, told in _told(model, revision, reasons):
        print(f"{what:<10} {told}")
    print(f"{'served':<10} {'no: ' + reasons[0] if reasons else 'yes'}")
    return FAILED if reasons else OK


def _told(model: str, revision: str | None, reasons: list[str]) -> Iterator[tuple[str, str]]:
    """Yield lines; append why it is not served."""
    path = Path(model).expanduser()
    if path.exists():
        yield "what", f"{model} is {recognise(path).kind.value}"
    try:
        checkpoint = resolve_checkpoint(model, revision)
    except PdserveError as error:
        reasons.append(str(error))
        return
    for what, tell in (
        ("model", _config),
        ("weights", _weights),
        ("packed", _packed),
        ("tokenizer", _tokenizer),
        ("templates", _templates),
        ("sampling", _sampling),
    ):
        try:
            yield what, tell(checkpoint)
        except PdserveError as error:
            reasons.append(str(error))


def _config(checkpoint: Checkpoint) -> str:
    from pdserve.engine.models.config import load_model_config

    config = load_model_config(checkpoint)
    ropes = {f"{rope.rope_type} {rope.theta:g}" if rope else "none" for rope in config.ropes}
    rope = " and ".join(sorted(ropes))
    experts = "" if config.experts is None else f", {config.experts.num_experts} experts"
    return (
        f"{config.architecture}, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads ({config.num_kv_heads} of keys) of {config.head_dim}{experts}, "
        f"{config.vocab_size} tokens, context {config.max_model_len}, rope {rope}"
    )


def _weights(checkpoint: Checkpoint) -> str:
    from pdserve.engine.models.quantised.config import weights_described

    files = checkpoint.weight_files()
    size = sum(file.stat().st_size for file in files)
    return f"{size / 2**20:.1f} MiB in {len(files)} files: {weights_described(checkpoint)}"


def _packed(checkpoint: Checkpoint) -> str:
    """As a node on a CPU has them. Raises ModelError: they are not those of the config."""
    from pdserve.engine.models.config import load_model_config
    from pdserve.engine.plan.forms import form_of
    from pdserve.engine.plan.model import ModelPlan
    from pdserve.engine.weights.codings import native_plan, stored_as
    from pdserve.engine.weights.finite import check_scales
    from pdserve.engine.weights.opening import open_tensors
    from pdserve.engine.weights.packing import packing

    config = load_model_config(checkpoint)
    whole = ModelPlan.of(config)
    expected, ignored = whole.expected(), whole.ignored()
    check_scales(open_tensors(checkpoint, expected, ignored=ignored, within=whole.within()))
    form = form_of("none", config.default_dtype("cpu"))
    plan = native_plan(checkpoint, config, form)
    return f"on CPUs, {packing(plan, stored_as(checkpoint, config))}"


def _tokenizer(checkpoint: Checkpoint) -> str:
    from coordinator.models.text_files import check_vocabulary
    from coordinator.text import Tokenizer
    from pdserve.engine.models.config import load_model_config
    from pdserve.model_files.end_tokens import described as ends_described
    from pdserve.model_files.end_tokens import end_tokens
    from pdserve.model_files.tokenizer import read_tokenizer

    backend, named = read_tokenizer(checkpoint.path)
    num_ids = load_model_config(checkpoint).vocab_size
    check_vocabulary(Tokenizer(backend, named, num_ids=num_ids), checkpoint.path)
    kind = type(backend.model).__name__
    begins = [backend.id_to_token(token) for token in backend.encode("").ids]
    begin = f"; texts begin with {' '.join(map(str, begins))}" if begins else ""
    ends = ends_described(end_tokens(checkpoint))
    return f"{kind} of {backend.get_vocab_size()} tokens{begin}; answers end at {ends}"


def _templates(checkpoint: Checkpoint) -> str:
    from coordinator.templates.template import ChatTemplate
    from coordinator.text.checkpoint import load_chat_templates
    from pdserve.model_files.tokenizer import read_tokenizer

    _, config = read_tokenizer(checkpoint.path)
    sources = load_chat_templates(checkpoint.path, config)
    for source in sources.values():
        ChatTemplate(source, config.named_special_tokens)
    return ", ".join(sources) or "none: completions alone are answered"


def _sampling(checkpoint: Checkpoint) -> str:
    from pdserve.model_files.sampling_defaults import sampling_defaults

    recommended = sampling_defaults(checkpoint).described()
    return f"{recommended or 'temperature 1, all tokens'}, where a request does not say"
