"""Text to token ids and back, exactly as the model's authors trained it, and the bytes each token stands for.

Owns loading (tokenizer.json or GGUF header arrays), the rules for the tokens added at both ends, and the byte table.
Must never know templates, requests or samplers. Encoding releases the GIL; a tokenizer is safe to share among threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend

from ceiba.checkpoint.base import TokenizerSource
from ceiba.core.errors import BadRequest, CheckpointError
from ceiba.core.limits import MAX_PROMPT_CHARS
from ceiba.text.gguf_vocab import SPACE, GgufVocab, build_gguf


def _byte_alphabet() -> dict[int, int]:
    """Printable stand-in -> byte, the reversible alphabet of GPT-2's byte-level BPE (Radford et al., 2019): printable
    bytes stand for themselves, the others for the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: b for b in printable}
    others = (b for b in range(256) if b not in table)
    table.update({256 + n: b for n, b in enumerate(others)})
    return table


_ALPHABET = _byte_alphabet()


class _JsonFile(msgspec.Struct):
    """The parts of tokenizer.json that decide how ids become bytes."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


@dataclass(slots=True)
class _Parts:
    backend: Backend
    kind: str
    tokens: list[str]
    control: set[int]
    added: set[int]
    space_prefix: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    named: dict[str, str] = field(default_factory=dict)
    middle: tuple[int, ...] | None = None


class Tokenizer:
    """A loaded vocabulary. Ids are int32; ids past the vocabulary (padding of the model's matrix) decode to nothing."""

    def __init__(self, parts: _Parts) -> None:
        self._backend = parts.backend
        self._literal: Backend | None = None
        self._lock = threading.Lock()
        self._tokens = parts.tokens
        self._prefix = parts.prefix
        self._suffix = parts.suffix
        self.middle_ids = parts.suffix if parts.middle is None else parts.middle
        """What stands between the two texts of a pair, whose ends are ``prefix_ids`` and ``suffix_ids``."""
        self._tables: dict[bool, ByteTable] = {}
        self._bytes: list[bytes] | None = None
        self.kind = parts.kind
        """``bytes`` or ``spm``: text is the tokens' bytes, joined. ``other``: only the whole sequence has a text."""
        self.space_prefix = parts.space_prefix
        """A space is put before text that follows a control token or begins a sequence, and taken off again."""
        self.control_ids: frozenset[int] = frozenset(parts.control)
        self.added_ids: frozenset[int] = frozenset(parts.added)
        self.bos_id = parts.bos_id
        self.eos_id = parts.eos_id
        self.special_tokens: dict[str, str] = parts.named
        """``bos_token``, ``eos_token``, … as chat templates know them."""

    # ── facts ────────────────────────────────────────────────────────────────

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._tokens)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What ``add_special`` puts before a text (usually the BOS token, or nothing)."""
        return self._prefix

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        return self._suffix

    def is_control(self, token_id: int) -> bool:
        """Whether the id is structure (``<|im_end|>``), which ``skip_special_tokens`` leaves out of the text."""
        return token_id in self.control_ids

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (``Ġthe``, ``▁the``); None outside the vocabulary."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    # ── text to ids ──────────────────────────────────────────────────────────

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> np.ndarray:
        """Ids of ``text``, int32 [n].

        ``add_special``: with the tokens the model expects at the ends; one that the text already begins or ends with
        is not doubled. ``parse_special``: ``<|im_end|>`` in the text is that token; otherwise plain characters.
        Raises BadRequest for text over the limit or with lone surrogates.
        """
        backend = self._backend if parse_special else self._as_characters()
        encoded = backend.encode(_checked(text), add_special_tokens=False)
        return self._with_ends(encoded.ids, add_special)

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[np.ndarray]:
        """The same for many texts, on as many threads as the tokenizers library is allowed."""
        backend = self._backend if parse_special else self._as_characters()
        encoded = backend.encode_batch_fast([_checked(t) for t in texts], add_special_tokens=False)
        return [self._with_ends(e.ids, add_special) for e in encoded]

    def _with_ends(self, ids: list[int], add_special: bool) -> np.ndarray:
        if add_special:
            if self._prefix and tuple(ids[: len(self._prefix)]) != self._prefix:
                ids = [*self._prefix, *ids]
            if self._suffix and tuple(ids[-len(self._suffix) :]) != self._suffix:
                ids = [*ids, *self._suffix]
        return np.array(ids, dtype=np.int32)

    def _as_characters(self) -> Backend:
        """A second backend that takes special tokens as text: the switch is a state of the backend, and flipping it
        under other threads would let their special tokens through."""
        with self._lock:
            if self._literal is None:
                twin = Backend.from_str(self._backend.to_str())
                twin.encode_special_tokens = True
                self._literal = twin
            return self._literal

    # ── ids to text ──────────────────────────────────────────────────────────

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the id adds to a text; empty outside the vocabulary. Control tokens give their own spelling.

        For ``other`` vocabularies (WordPiece) this is the token's own text, without the spaces between words.
        """
        table = self._byte_list()
        return table[token_id] if 0 <= token_id < len(table) else b""

    def table(self, skip_special: bool) -> ByteTable:
        """Lookup lists for incremental decoding, made once; ``skip_special`` empties the control tokens."""
        with self._lock:
            found = self._tables.get(skip_special)
            if found is None:
                found = ByteTable.build(self._byte_list(), self.control_ids if skip_special else frozenset())
                self._tables[skip_special] = found
            return found

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD.

        ``spaces_between_special_tokens`` matters only where the decoder puts spaces between tokens (WordPiece).
        """
        sequence = [int(i) for i in ids]
        if self.kind == "other":
            return self._decode_other(sequence, skip_special_tokens, spaces_between_special_tokens)
        table = self._byte_list()
        size, hidden = len(table), self.control_ids if skip_special_tokens else ()
        data = b"".join([table[i] for i in sequence if 0 <= i < size and i not in hidden])
        text = data.decode("utf-8", "replace")
        return text[1:] if self.space_prefix and text.startswith(" ") else text

    def _decode_other(self, ids: list[int], skip: bool, spaces: bool) -> str:
        ids = [i for i in ids if 0 <= i < len(self._tokens) and not (skip and i in self.control_ids)]
        if spaces or not any(i in self.added_ids for i in ids):
            return self._backend.decode(ids, skip_special_tokens=False)
        runs: list[str] = []
        start = 0
        while start < len(ids):
            end = start + 1
            special = ids[start] in self.added_ids
            while end < len(ids) and (ids[end] in self.added_ids) == special:
                end += 1
            part = ids[start:end]
            text = (
                "".join(self._tokens[i] for i in part)
                if special
                else self._backend.decode(part, skip_special_tokens=False)
            )
            runs.append(text)
            start = end
        return " ".join(runs)

    def _byte_list(self) -> list[bytes]:
        if self._bytes is None:
            if self.kind == "bytes":
                self._bytes = _bytes_of_alphabet(self._tokens, self.added_ids)
            elif self.kind == "spm":
                self._bytes = _bytes_of_spm(self._tokens, self.added_ids)
            else:
                self._bytes = [t.removeprefix("##").encode("utf-8", "replace") for t in self._tokens]
        return self._bytes


@dataclass(slots=True, frozen=True)
class ByteTable:
    """Per id: its bytes, and its text where the bytes are whole characters (else None)."""

    data: list[bytes]
    text: list[str | None]

    @staticmethod
    def build(data: list[bytes], hidden: frozenset[int]) -> ByteTable:
        if hidden:
            data = list(data)
            for i in hidden:
                data[i] = b""
        text: list[str | None] = []
        for item in data:
            try:
                text.append(item.decode("utf-8"))
            except UnicodeDecodeError:
                text.append(None)
        return ByteTable(data, text)


def _checked(text: str) -> str:
    if len(text) > MAX_PROMPT_CHARS:
        raise BadRequest(
            f"the text has {len(text)} characters, more than the limit of {MAX_PROMPT_CHARS}; send less", param="input"
        )
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"the text has a lone surrogate at character {error.start}, which is not Unicode text; "
                "send whole characters",
                param="input",
            ) from None
    return text


def _bytes_of_alphabet(tokens: list[str], added: frozenset[int]) -> list[bytes]:
    """All tokens in one translation: the alphabet has no newline, so one may stand between them."""
    plain = ["" if i in added or "\n" in t else t for i, t in enumerate(tokens)]
    try:
        # A newline stands for no byte of the alphabet; 0x100 + n would be its own code, so map it to itself.
        joined = "\n".join(plain).translate({**_ALPHABET, 10: 0xE000})
        parts = [p.encode("latin-1") for p in joined.split("\ue000")]
    except UnicodeEncodeError:
        parts = [_alphabet_bytes(t) for t in plain]
    for i, token in enumerate(tokens):
        if not plain[i] and token:
            parts[i] = token.encode("utf-8", "replace")
    return parts


def _alphabet_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[ord(c)] for c in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _bytes_of_spm(tokens: list[str], added: frozenset[int]) -> list[bytes]:
    table = []
    for i, token in enumerate(tokens):
        if i in added:
            table.append(token.replace(SPACE, " ").encode("utf-8", "replace"))
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                table.append(bytes([int(token[3:5], 16)]))
            except ValueError:
                table.append(token.encode("utf-8", "replace"))
        else:
            table.append(token.replace(SPACE, " ").encode("utf-8", "replace"))
    return table


# ── loading ──────────────────────────────────────────────────────────────────


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer a checkpoint names. Raises CheckpointError when there is none or it cannot be read."""
    if source.tokenizer_json is not None:
        return Tokenizer(_from_json(source))
    if source.gguf is not None:
        try:
            vocab = build_gguf(source.gguf)
        except (ValueError, TypeError, OverflowError) as error:
            raise CheckpointError(f"the tokenizer in this GGUF header is damaged: {error}") from error
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception for bad vocabularies
            raise CheckpointError(f"the tokenizer in this GGUF header cannot be built: {error}") from error
        return Tokenizer(_from_gguf(vocab, source))
    raise CheckpointError(
        "this model comes without a tokenizer (no tokenizer.json and no GGUF vocabulary); "
        "name one with --tokenizer-path, or start with --skip-tokenizer-init and send token ids"
    )


def _from_gguf(vocab: GgufVocab, source: TokenizerSource) -> _Parts:
    bos = vocab.bos_id if vocab.bos_id is not None else source.bos_id
    eos = vocab.eos_id if vocab.eos_id is not None else (source.eos_ids[0] if source.eos_ids else None)
    named = {"bos_token": bos, "eos_token": eos} | {f"{k}_token": v for k, v in vocab.roles.items()}
    return _Parts(
        backend=vocab.backend,
        kind=vocab.kind,
        tokens=vocab.tokens,
        control=vocab.control,
        added=vocab.added,
        space_prefix=vocab.space_prefix,
        prefix=(bos,) if vocab.add_bos and bos is not None else (),
        suffix=(eos,) if vocab.add_eos and eos is not None else (),
        bos_id=bos,
        eos_id=eos,
        named={k: vocab.tokens[v] for k, v in named.items() if v is not None and 0 <= v < len(vocab.tokens)},
    )


def _from_json(source: TokenizerSource) -> _Parts:
    path = Path(source.tokenizer_json or "")
    try:
        raw = path.read_bytes()
        outline = msgspec.json.decode(raw, type=_JsonFile)
        backend = Backend.from_str(raw.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except Exception as error:  # the tokenizers library raises bare Exception for bad files
        raise CheckpointError(f"{path} is not a tokenizer.json we can read: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        tokens[i] = token
    control = {int(t["id"]) for t in outline.added_tokens if t.get("special")}
    added = {int(t["id"]) for t in outline.added_tokens}
    kind, space_prefix = _decoder_kind(outline.decoder)
    named = _named_tokens(source.tokenizer_config)
    bos = vocab.get(named.get("bos_token", ""), source.bos_id)
    eos: int | None = vocab.get(named.get("eos_token", ""), source.eos_ids[0] if source.eos_ids else None)
    prefix, suffix = _ends(backend, source, bos, eos)
    for role, token_id in (("bos_token", bos), ("eos_token", eos)):
        if token_id is not None and 0 <= token_id < len(tokens):
            named.setdefault(role, tokens[token_id])
    middle = _middle(backend, prefix, suffix)
    return _Parts(backend, kind, tokens, control, added, space_prefix, prefix, suffix, bos, eos, named, middle)


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[str, bool]:
    """(kind, whether one space at the start is taken off) from tokenizer.json's decoder."""
    if decoder is None:
        return "other", False
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    names = [step.get("type") for step in steps or []]
    if "ByteLevel" in names and set(names) <= {"ByteLevel", "Fuse"}:
        return "bytes", False
    if names == ["Metaspace"] and steps:
        scheme = steps[0].get("prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never")
        return "spm", scheme != "never"
    if "ByteFallback" in names and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaces = [s for s in steps or [] if s.get("type") == "Replace"]
        if all(s.get("pattern") == {"String": SPACE} and s.get("content") == " " for s in replaces):
            return "spm", "Strip" in names
    return "other", False


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like from tokenizer_config.json, where each is a string or an object with ``content``."""
    named = {}
    for key, value in config.items():
        if not key.endswith("_token") or key.startswith(("add_", "use_")):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
    return named


def _middle(backend: Backend, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> tuple[int, ...] | None:
    """What the post-processor puts between the texts of a pair; None where it makes nothing of pairs."""
    inner = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", "a", add_special_tokens=True).ids
    rest = len(whole) - 2 * len(inner) - len(prefix) - len(suffix)
    if rest <= 0:
        return None
    start = len(prefix) + len(inner)
    middle = whole[start : start + rest]
    return tuple(middle) if [*prefix, *inner, *middle, *inner, *suffix] == whole else None


def _ends(
    backend: Backend, source: TokenizerSource, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts around a text, corrected by add_bos_token and add_eos_token where they are said."""
    inner = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    for at in range(len(whole) - len(inner) + 1):
        if whole[at : at + len(inner)] == inner:
            prefix, suffix = tuple(whole[:at]), tuple(whole[at + len(inner) :])
            break
    say_bos = source.tokenizer_config.get("add_bos_token", True if source.add_bos else None)
    say_eos = source.tokenizer_config.get("add_eos_token", True if source.add_eos else None)
    if bos is not None and say_bos is not None:
        rest = prefix[1:] if prefix[:1] == (bos,) else prefix
        prefix = (bos, *rest) if say_bos else rest
    if eos is not None and say_eos is not None:
        rest = suffix[:-1] if suffix[-1:] == (eos,) else suffix
        suffix = (*rest, eos) if say_eos else rest
    return prefix, suffix
