"""How byte-level BPE vocabularies cut text before merging, by the ``tokenizer.ggml.pre`` name of a GGUF header.

Owns the table of split patterns, each a public fact of the model that uses it (it stands in that model's
tokenizer.json). Must never know a vocabulary: a pattern is chosen by name alone, and an unknown name is an error,
because a wrong split gives wrong tokens without any sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ceiba.core.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_TAIL = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTIONS + "|" + _CL100K_TAIL % "{1,3}"
_QWEN2 = _CONTRACTIONS + "|" + _CL100K_TAIL % ""
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_TEKKEN = "|".join(
    (_CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES),
)
_GPT4O = "|".join(
    (
        _CASED % ("*", "+") + _CONTRACTIONS + "?",
        _CASED % ("+", "*") + _CONTRACTIONS + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    )
)
_NOT_HAN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        _NOT_HAN % ("*", "+") + _CONTRACTIONS + "?",
        _NOT_HAN % ("+", "*") + _CONTRACTIONS + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        _SPACES,
    )
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
# The cased letters as DeepSeek LLM lists them: an older Unicode than ours, so the ranges are written out,
# as escapes, because some are compatibility characters that an editor would normalise away.
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DIGIT = r"\p{N}"
_DIGITS3 = r"\p{N}{1,3}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Split patterns applied one after another, each to the pieces (matches and gaps) the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is itself a token is taken whole, whatever the merges say."""
    nfc: bool = False
    """The model's own tokenizer composes characters (NFC) first."""
    add_bos: bool = False
    """What the model expects when the header does not say."""


_TABLE: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"),
            *("roberta-bpe", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling", "jais"),
        ),
        PreTokenizer((_GPT2,)),
    ),
    (("mpt", "olmo", "modern-bert"), PreTokenizer((_GPT2,), nfc=True)),
    (
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    (("command-r",), PreTokenizer((_DIGIT, _GPT2), nfc=True)),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan"), PreTokenizer((_QWEN2,), nfc=True)),
    (("stablelm2", "solar-open", "grok-2"), PreTokenizer((_QWEN2,))),
    (("qwen35",), PreTokenizer((_QWEN35,))),
    (
        ("deepseek-llm",),
        PreTokenizer(("[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")),
    ),
    (("deepseek-coder",), PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))),
    (
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        PreTokenizer((_DIGITS3, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    ),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
    (("kimi-k2",), PreTokenizer((_KIMI,))),
    (("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer((_BLOOM,))),
    (("viking",), PreTokenizer((_BLOOM, _DIGIT))),
    (
        ("seed-coder",),
        PreTokenizer(
            (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,),
        ),
    ),
    (
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+",
            )
        ),
    ),
    (("minicpm5",), PreTokenizer((_DIGITS3, _CONTRACTIONS + "|" + _CL100K_TAIL % "+"), ignore_merges=True)),
    # Headers written before ``pre`` existed. Their writers' rule, kept because their readers relied on it.
    (
        ("default",),
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _TABLE for name in names}


def pre_tokenizer(pre: str) -> PreTokenizer:
    """The rule of that name. Raises CheckpointError for one we do not know."""
    rule = PRE_TOKENIZERS.get(pre)
    if rule is None:
        raise CheckpointError(
            f"this GGUF file cuts text by the rule {pre!r} (tokenizer.ggml.pre), which is not one we know: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Give the model's own tokenizer with --tokenizer-path DIR "
            "(a folder with tokenizer.json)."
        )
    return rule
