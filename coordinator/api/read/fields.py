"""Request fields that several endpoints share; their ranges are checked when decoding."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Priority = Annotated[int, Meta(ge=-(2**30), le=2**30)]  # lower values go first, as in vLLM
MAX_CHOICES = 128  # per prompt
MAX_LOGPROBS = 20  # listed per token
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_ALLOWED_IDS = 16384
MAX_BAD_WORDS = 128
BadWordText = Annotated[str, Meta(min_length=1, max_length=64)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk, as in vLLM
    include_obfuscation: bool | None = None  # padding against traffic analysis; without effect


class JsonSchemaFormat(Struct, kw_only=True, rename={"schema_": "schema"}):
    """A JSON schema that the answer must match. It is enforced whether `strict` is set or not."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(
    Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}
):
    """The format required of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = None  # of a `json_object`, as in llama.cpp and Together


MAX_ANSWERS = 4096  # alternatives of a choice constraint
AnswerList = Annotated[list[str], Meta(min_length=1, max_length=MAX_ANSWERS)]


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True, rename={"json_": "json"}):
    """vLLM's parameter for structured output; exactly one constraint may be set."""

    json_: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: AnswerList | None = None
    grammar: str | None = None


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]


class CallFields(Struct, kw_only=True):
    """Fields that all endpoints which run work on nodes accept, besides the model's name."""

    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    slo_class: str | None = None  # name of one of the cluster's service classes
    priority: Priority | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # -1: all that fit
    truncation_side: Literal["left", "right"] | None = None  # side that is cut; default: left


class GenerationFields(CallFields, kw_only=True):
    """Fields that both chat and text completions accept."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None  # 0: only the likeliest token
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
    # Extensions, named as other servers name them.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # 0 and -1 = off
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWordText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROBS)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for include_stop_str_in_output
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # guided_*: older names of structured outputs
    guided_regex: str | None = None
    guided_choice: AnswerList | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # regex, ebnf, json_schema: SGLang's names of the same
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    prompt_logprobs: NumLogprobs | None = None  # this and the following as in vLLM
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
