"""How texts are divided into words before byte-level BPE, by the names of `tokenizer.ggml.pre`.

A file has the name only: the expressions are those of the tokenizers that llama.cpp has met under
it. With the wrong one, tokens are subtly wrong, so an unknown name is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Words:
    """What divides texts. Each expression divides further what those before it have left."""

    expressions: tuple[str, ...]
    keeps_whole: bool = False  # a word that is a token is not merged from its bytes
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # texts are normalised to NFC


def _class(ranges: str) -> str:
    """An expression for one of the characters in these ranges of code points."""
    bounds = (part.partition("-") for part in ranges.split())
    return "[" + "".join(rf"\x{{{a}}}-\x{{{b or a}}}" for a, _, b in bounds) + "]"


_SPACES: Final = r"\s+(?!\S)|\s+"
_LINES: Final = rf"\s*[\r\n]+|{_SPACES}"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_DIGIT: Final = r"\p{N}"


def _plain(digits: str, marks: str = "") -> str:
    """Words are letters, and a character before them; marks are letters too, or symbols."""
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+"
    symbols = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return f"{_ENDINGS}|{letters}|{digits}|{symbols}|{_LINES}"


def _cased(digits: str, endings: str) -> str:
    """Words begin where capitals do."""
    before, any_case = r"[^\r\n\p{L}\p{N}]?", r"\p{Lm}\p{Lo}\p{M}"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{any_case}]", rf"[\p{{Ll}}{any_case}]"
    words = f"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_CASED_LETTERS: Final = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D "
    "1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE "
    "2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 "
    "FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943 "
)
_PUNCTUATION: Final = _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_ASIAN: Final = _class("4E00-9FA5 800-4E00 AC00-D7FF")
_HAN_AND_KANA: Final = _class("4E00-9FA5 3040-309F 30A0-30FF")

_OF_GPT2: Final = Words((_GPT2,))
_OF_CODE: Final = Words((_DIGIT, _GPT2))
_OF_LLAMA3: Final = Words((_plain(r"\p{N}{1,3}"),), keeps_whole=True, adds_bos=True)
_OF_QWEN2: Final = Words((_plain(_DIGIT),), composes=True)
_OF_GPT4O: Final = Words((_cased(r"\p{N}{1,3}", f"{_ENDINGS}?"),))
_OF_DEEPSEEK3: Final = Words(
    (
        r"\p{N}{1,3}",
        f"{_HAN_AND_KANA}+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
    )
)

WORDS: Final[dict[str, Words]] = {
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "falcon-h1": _OF_LLAMA3,
    "pixtral": _OF_LLAMA3,
    "midm-2.0": _OF_LLAMA3,
    "lfm2": _OF_LLAMA3,
    "dbrx": Words((_plain(r"\p{N}{1,3}"),)),
    "smaug-bpe": Words((_plain(r"\p{N}{1,3}"),)),
    "chatglm-bpe": Words((_plain(r"\p{N}{1,3}"),)),
    "glm4": Words((_plain(r"\p{N}{1,3}"),), keeps_whole=True),
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "megrez": _OF_QWEN2,
    "kormo": _OF_QWEN2,
    "hunyuan": Words((_plain(_DIGIT),)),
    "grok-2": Words((_plain(_DIGIT),)),
    "stablelm2": Words((_plain(_DIGIT),)),
    "qwen35": Words((_plain(_DIGIT, r"\p{M}"),)),
    "tekken": Words((_cased(_DIGIT, ""),), keeps_whole=True, adds_bos=True),
    "gpt-4o": _OF_GPT4O,
    "llama4": _OF_GPT4O,
    "kanana2": _OF_GPT4O,
    "tiny_aya": Words((r"\d{1,3}(?=(?:\d{3})*\b)", *_OF_GPT4O.expressions)),
    "minicpm5": Words((r"\p{N}{1,3}", _plain(r"\p{N}+")), keeps_whole=True),
    "seed-coder": Words(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+|{_LINES}",)
    ),
    "gpt-2": _OF_GPT2,
    "phi-2": _OF_GPT2,
    "gigachat": _OF_GPT2,
    "a.x-4.0": _OF_GPT2,
    "mellum": _OF_GPT2,
    "exaone4": _OF_GPT2,
    "jais": _OF_GPT2,
    "trillion": _OF_GPT2,
    "granite-docling": _OF_GPT2,
    "mpt": Words((_GPT2,), composes=True),
    "olmo": Words((_GPT2,), composes=True),
    "starcoder": _OF_CODE,
    "refact": _OF_CODE,
    "command-r": _OF_CODE,
    "smollm": _OF_CODE,
    "codeshell": _OF_CODE,
    "exaone": _OF_CODE,
    "minerva-7b": _OF_CODE,
    "falcon": Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": Words(
        (
            r"[\r\n]",
            rf"\s?{_CASED_LETTERS}+",
            rf"\s?{_PUNCTUATION}+",
            r"\s+$",
            f"{_ASIAN}+",
            _DIGIT,
        )
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_ASIAN}+", _DIGIT)),
    "deepseek-v3": _OF_DEEPSEEK3,
    "hunyuan-dense": _OF_DEEPSEEK3,
    "joyai-llm": _OF_DEEPSEEK3,
}
