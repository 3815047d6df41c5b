"""Builds a tokenizer from the arrays of a GGUF header (``tokenizer.ggml.*``), which come from strangers.

Owns the translation of token lists, types, scores and merges into a ``tokenizers.Tokenizer``: byte-level BPE
(``gpt2``), SentencePiece BPE (``llama``, ``gemma4``), SentencePiece unigram (``t5``) and WordPiece (``bert``). Must
never know where the header was read from or what is done with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from ceiba.core.errors import CheckpointError
from ceiba.text.pretokenize import pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The values of ``token_type``."""

SPACE = "▁"
"""How SentencePiece writes a space."""

_MAX_MERGES = 4_000_000
_MAX_TOKENS = 4_000_000


@dataclass(slots=True)
class GgufVocab:
    """What a header amounts to."""

    backend: Backend
    kind: str
    """``bytes`` (byte-level alphabet), ``spm`` (▁ and <0xNN>) or ``other`` (the backend's own decoder)."""
    tokens: list[str]
    control: set[int]
    """Ids that are structure, not text: never made from text unless special tokens are parsed."""
    added: set[int]
    """Ids matched whole before anything else: control and user-defined tokens."""
    add_bos: bool
    add_eos: bool
    bos_id: int | None
    eos_id: int | None
    space_prefix: bool = False
    roles: dict[str, int] = field(default_factory=dict)
    """``unk``, ``pad``, ``sep``, ``cls``, ``mask`` where the header names them."""


def build_gguf(header: dict[str, Any]) -> GgufVocab:
    """A tokenizer out of header arrays. Raises CheckpointError for a damaged or unknown one."""
    model = str(header.get("model", ""))
    builders: dict[str, Callable[[_Header], GgufVocab]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece_bpe,
        "gemma4": _sentencepiece_merges,
        "t5": _unigram,
        "bert": _wordpiece,
    }
    if model not in builders:
        raise CheckpointError(
            f"tokenizer.ggml.model {model!r} is not one we read ({', '.join(builders)}); "
            "give the model's own tokenizer with --tokenizer-path DIR (a folder with tokenizer.json)"
        )
    return builders[model](_Header(header))


class _Header:
    """The arrays, checked: equal lengths, ids inside the list."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        tokens = raw.get("tokens")
        if tokens is None or not 0 < len(tokens) <= _MAX_TOKENS:
            raise CheckpointError("tokenizer.ggml.tokens is missing, empty or too long: this file has no vocabulary")
        self.tokens = [t if isinstance(t, str) else bytes(t).decode("utf-8", "replace") for t in tokens]
        n = len(self.tokens)
        self.types = [int(t) for t in self._array("token_type", n)] or [NORMAL] * n
        self.ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            self.ids.setdefault(token, i)

    def _array(self, key: str, length: int | None = None) -> Sequence[Any]:
        value = self.raw.get(key)
        if value is None:
            return []
        if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
            raise CheckpointError(f"tokenizer.ggml.{key} is not an array")
        if length is not None and len(value) != length:
            raise CheckpointError(f"tokenizer.ggml.{key} has {len(value)} entries for {length} tokens")
        return value.tolist() if hasattr(value, "tolist") else value

    def scores(self) -> list[float]:
        scores = self._array("scores", len(self.tokens))
        if not scores:
            raise CheckpointError("tokenizer.ggml.scores is missing, which this kind of vocabulary is ordered by")
        return [float(s) for s in scores]

    def merges(self) -> list[tuple[str, str]]:
        """Pairs in rank order; a pair whose parts or result are no tokens can never apply and is left out."""
        raw = self._array("merges")
        if not raw:
            raise CheckpointError("tokenizer.ggml.merges is missing, which a BPE vocabulary needs")
        if len(raw) > _MAX_MERGES:
            raise CheckpointError(f"tokenizer.ggml.merges has {len(raw)} entries, more than {_MAX_MERGES}")
        ids = self.ids
        pairs = []
        for entry in raw:
            if not isinstance(entry, str):
                entry = bytes(entry).decode("utf-8", "replace")
            # A part may itself begin with a space, so the border is the first space after the first character.
            border = entry.find(" ", 1)
            left, right = entry[:border], entry[border + 1 :]
            if border > 0 and left in ids and right in ids and left + right in ids:
                pairs.append((left, right))
        return pairs

    def role(self, *names: str) -> int | None:
        for name in names:
            value = self.raw.get(f"{name}_token_id")
            if value is not None and 0 <= int(value) < len(self.tokens):
                return int(value)
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def of_type(self, *types: int) -> set[int]:
        return {i for i, t in enumerate(self.types) if t in types}

    def finish(self, backend: Backend, kind: str, *, add_bos: bool, add_eos: bool = False, **more: Any) -> GgufVocab:
        control = self.of_type(CONTROL, UNKNOWN)
        added = control | self.of_type(USER_DEFINED)
        rstrip = self._strips_after_control()
        backend.add_tokens(
            [
                AddedToken(self.tokens[i], special=i in control, normalized=False, rstrip=rstrip and i in control)
                for i in sorted(added)
                if self.tokens[i] and self.ids[self.tokens[i]] == i
            ]
        )
        roles = {
            name: value
            for name, value in (
                ("unk", self.role("unknown")),
                ("pad", self.role("padding")),
                ("sep", self.role("seperator", "separator")),
                ("cls", self.role("cls")),
                ("mask", self.role("mask")),
            )
            if value is not None
        }
        return GgufVocab(
            backend=backend,
            kind=kind,
            tokens=self.tokens,
            control=control,
            added=added,
            add_bos=self.flag("add_bos_token", add_bos),
            add_eos=self.flag("add_eos_token", add_eos),
            bos_id=self.role("bos"),
            eos_id=self.role("eos"),
            roles=roles,
            **more,
        )

    def _strips_after_control(self) -> bool:
        """Phi-3's control tokens swallow the white space after them; the header has no field that says so."""
        phi3 = ("<|placeholder1|>", "<|assistant|>", "<|end|>")
        return self.raw.get("model") == "llama" and all(t in self.ids for t in phi3)


def _byte_level(header: _Header) -> GgufVocab:
    rule = pre_tokenizer(str(header.raw.get("pre") or "default"))
    backend = Backend(
        models.BPE(vocab=header.ids, merges=header.merges(), ignore_merges=rule.ignore_merges, fuse_unk=False)
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return header.finish(backend, "bytes", add_bos=rule.add_bos)


def _sentencepiece_bpe(header: _Header) -> GgufVocab:
    """SentencePiece's BPE joins the pair whose result scores best (leftmost among equals), which a merge list in
    order of the result's score states too. Two pairs with the same result tie there and not here; they are ordered as
    the models' own tokenizer.json files order them: longer left part first.
    """
    scores = header.scores()
    # Only text may be made from text: a control or unused token has no merges.
    usable = {t: i for t, i in header.ids.items() if header.types[i] in (NORMAL, USER_DEFINED) and t}
    found = []
    for token, i in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-scores[i], -cut, i, left, right))
    found.sort(key=lambda m: m[:3])
    return _sentencepiece(header, [(m[3], m[4]) for m in found], header.flag("add_space_prefix", True), add_bos=True)


def _sentencepiece_merges(header: _Header) -> GgufVocab:
    """Gemma 4: SentencePiece's alphabet with an explicit merge list."""
    vocab = _sentencepiece(header, header.merges(), header.flag("add_space_prefix", False), add_bos=True)
    vocab.add_bos = True  # Early files say false, which the model does not survive.
    return vocab


def _sentencepiece(header: _Header, merges: list[tuple[str, str]], space_prefix: bool, *, add_bos: bool) -> GgufVocab:
    unknown = header.role("unknown")
    backend = Backend(
        models.BPE(
            vocab=header.ids,
            merges=merges,
            unk_token=header.tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=bool(header.of_type(BYTE)),
        )
    )
    steps: list[Any] = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if str(header.raw.get("model")) == "gemma4":
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if space_prefix else [])
    )
    return header.finish(backend, "spm", add_bos=add_bos, space_prefix=space_prefix)


def _unigram(header: _Header) -> GgufVocab:
    unknown = header.role("unknown")
    if unknown is None:
        raise CheckpointError("tokenizer.ggml.unknown_token_id is missing, which a unigram vocabulary needs")
    pieces = list(zip(header.tokens, header.scores(), strict=True))
    backend = Backend(models.Unigram(pieces, unk_id=unknown, byte_fallback=bool(header.of_type(BYTE))))
    steps: list[Any] = []
    charsmap = header.raw.get("precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(bytes(bytearray(charsmap))))
    if header.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    space_prefix = header.flag("add_space_prefix", True)
    scheme = "always" if space_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return header.finish(backend, "spm", add_bos=False, add_eos=True, space_prefix=space_prefix)


def _wordpiece(header: _Header) -> GgufVocab:
    """GGUF marks the start of a word (▁) where WordPiece marks its continuation (##)."""
    control = header.of_type(CONTROL, UNKNOWN)
    renamed = [
        token
        if i in control
        else (token[1:] if token.startswith(SPACE) else token if _is_bracketed(token) else "##" + token)
        for i, token in enumerate(header.tokens)
    ]
    header.tokens = renamed
    header.ids = {}
    for i, token in enumerate(renamed):
        header.ids.setdefault(token, i)
    unknown = header.role("unknown")
    backend = Backend(
        models.WordPiece(
            vocab=header.ids,
            unk_token=renamed[unknown] if unknown is not None else "[UNK]",
            max_input_chars_per_word=100,
        )
    )
    lowercase = header.flag("normalizer.lowercase", True)
    strip_accents = header.raw.get("normalizer.strip_accents")
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=None if strip_accents is None else bool(strip_accents),
        lowercase=lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    vocab = header.finish(backend, "other", add_bos=True, add_eos=True)
    vocab.bos_id = vocab.roles.get("cls", vocab.bos_id)
    vocab.eos_id = vocab.roles.get("sep", vocab.eos_id)
    return vocab


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]") and len(token) > 2
