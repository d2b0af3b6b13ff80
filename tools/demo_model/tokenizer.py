"""The tokenizer of the demo model: byte-level BPE with single digits and chat markers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_model.conversation import Conversation, Document

VOCAB_SIZE: Final = 2048

END_OF_TEXT: Final = "<|endoftext|>"
BOS: Final = "<|bos|>"
END: Final = "<|end|>"
ROLE_TOKENS: Final = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
}
SPECIAL_TOKENS: Final = (END_OF_TEXT, BOS, *ROLE_TOKENS.values(), END)
"""In the order of their ids, from 0."""

# Content may be a string or the list of parts of the OpenAI API; null content is empty. Tools,
# calls and results are written as Hermes models have them; tool_calls.py writes them as this does.
CHAT_TEMPLATE: Final = """\
{%- macro text_of(message) -%}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}
            {{- part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|><tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' ~ (tool['function'] | tojson) -}}
    {%- endfor -%}
    {{- '\\n</tools><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'tool' -%}
        {{- '<|user|><tool_response>\\n' ~ text_of(message) ~ '\\n</tool_response><|end|>' -}}
    {%- elif message['role'] in ['system', 'user', 'assistant'] -%}
        {{- '<|' ~ message['role'] ~ '|>' ~ text_of(message) -}}
        {%- for call in message['tool_calls'] or [] -%}
            {%- if text_of(message) or not loop.first -%}
                {{- '\\n' -}}
            {%- endif -%}
            {{- '<tool_call>\\n{"name": "' ~ call['function']['name'] ~ '", "arguments": ' -}}
            {{- call['function']['arguments'] | tojson ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('unknown role: ' ~ message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def document_texts(documents: Iterable[Document]) -> Iterable[str]:
    """Yield the text of the documents without any markup, to learn the merges from."""
    for document in documents:
        if isinstance(document, Conversation):
            yield from (message.text for message in document.messages)
        else:
            yield document.text


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn a byte-level BPE tokenizer; every byte is in the alphabet, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A digit is always one token: a sum has to see the digits it adds.
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, token_id(tokenizer, BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
