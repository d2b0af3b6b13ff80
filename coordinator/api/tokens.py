"""/tokenize and /detokenize, as in vLLM: the tokens that the model sees. No node is involved."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from coordinator.api.context import RequestTrace
from coordinator.api.prompt.chat import encode_chat
from coordinator.api.prompt.fit import check_num_chars
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Message, Tool
from coordinator.api.read.fields import TokenId
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest


class TokenizeRequest(Struct, kw_only=True):
    """The body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class TokenizeAnswer(Struct, kw_only=True):
    """The answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as in the vocabulary


class DetokenizeRequest(Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(Struct, kw_only=True):
    """The answer to POST /detokenize: the text of the tokens."""

    prompt: str


async def tokenize(ask: Ask) -> TokenizeAnswer:
    """POST /tokenize: convert a text or a conversation to tokens."""
    body = convert_request(ask.values, TokenizeRequest)
    model = await ask.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("the request needs either 'prompt' or 'messages'", "prompt")
    asker = counting(ask.trace)
    token_ids = await _token_ids(body, model, asker)
    strings = model.tokenizer.vocabulary_strings
    strs = await strings(token_ids, asker) if body.return_token_strs else None
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=model.max_model_len(),
        tokens=token_ids,
        token_strs=strs,
    )


async def detokenize(ask: Ask) -> DetokenizeAnswer:
    """POST /detokenize: convert tokens to text, special tokens included."""
    name, given = ask.values.get("model"), ask.values.get("tokens")
    model = await ask.model(name if isinstance(name, str) else None)
    most = model.max_model_len()
    if isinstance(given, list) and len(given) > most:  # before they are looked at
        raise ContextLengthExceeded(
            f"'tokens' has {len(given)} items, but this model's maximum context length is {most} "
            "tokens",
            "tokens",
        )
    body = convert_request(ask.values, DetokenizeRequest)
    model.tokenizer.check_ids(body.tokens, "tokens")
    text = await model.tokenizer.decode_all(body.tokens, counting(ask.trace))
    return DetokenizeAnswer(prompt=text)


def counting(trace: RequestTrace) -> Asker:
    """Return for whom texts of calls that run on no node are tokenised.

    They take turns of their own: the caller's other calls do not wait behind them.
    """
    return Asker(f"{trace.payer} counts")


async def _token_ids(body: TokenizeRequest, model: Model, asker: Asker) -> list[int]:
    if body.prompt is not None:
        check_num_chars(len(body.prompt), model.tokenizer, model.max_model_len(), "prompt")
        adds = body.add_special_tokens is not False
        texts = [body.prompt]
        (token_ids,) = await model.tokenizer.encode_texts(texts, asker, add_special_tokens=adds)
        return token_ids
    assert body.messages is not None
    chat_request = ChatRequest(
        model="",
        messages=body.messages,
        tools=body.tools,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return await encode_chat(chat_request, model, asker, may_be_empty=True)
