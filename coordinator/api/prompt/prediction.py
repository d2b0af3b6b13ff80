"""What a client expects a chat to be answered, as tokens: it makes the answer faster, no other."""

from __future__ import annotations

from coordinator.api.prompt.fit import check_num_chars
from coordinator.api.read.chat import ChatRequest
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

_PARAM = "prediction"


async def predicted(body: ChatRequest, model: Model, asker: Asker) -> list[int]:
    """Return the tokens of `prediction`; none if there is none. Raises RequestError."""
    if body.prediction is None:
        return []
    content = body.prediction.content
    if not isinstance(content, str):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"'prediction.content[{i}]' must be a part of type 'text'", f"{_PARAM}.content"
                )
        content = "".join(part.text or "" for part in content)
    most = model.max_model_len()
    check_num_chars(len(content), model.tokenizer, most, _PARAM)
    (token_ids,) = await model.tokenizer.encode_texts([content], asker, add_special_tokens=False)
    if len(token_ids) > most:
        raise ContextLengthExceeded(
            f"'prediction' has {len(token_ids)} tokens, more than the {most} of this model's "
            "maximum context length: leave out what will not be answered",
            _PARAM,
        )
    return token_ids
