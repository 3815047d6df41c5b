"""Tokenizers written for plainness, not speed: the references that the real ones are compared with.

Each follows the published algorithm literally (Sennrich et al. 2016 for BPE, Kudo & Richardson 2018 for SentencePiece's
BPE) with quadratic loops.
"""

from __future__ import annotations

import regex


def byte_alphabet() -> dict[int, str]:
    """GPT-2's bytes_to_unicode, as its paper's code defines it."""
    keep = (
        list(range(ord("!"), ord("~") + 1)) + list(range(ord("¡"), ord("¬") + 1)) + list(range(ord("®"), ord("ÿ") + 1))
    )
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _isolate(pieces: list[str], pattern: str) -> list[str]:
    out = []
    for piece in pieces:
        at = 0
        for match in regex.finditer(pattern, piece):
            if match.start() > at:
                out.append(piece[at : match.start()])
            if match.group():
                out.append(match.group())
            at = match.end()
        if at < len(piece):
            out.append(piece[at:])
    return out


def byte_bpe(text: str, vocab: dict[str, int], merges: list[str], patterns: list[str]) -> list[int]:
    """Byte-level BPE: split, map bytes to letters, apply the lowest-ranked merge until none is left."""
    alphabet = byte_alphabet()
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    pieces = [text]
    for pattern in patterns:
        pieces = _isolate(pieces, pattern)
    ids = []
    for piece in pieces:
        parts = [alphabet[b] for b in piece.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), len(ranks)))
            pair = (parts[best], parts[best + 1])
            if pair not in ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        ids += [vocab[p] for p in parts]
    return ids


def spm_bpe(text: str, vocab: dict[str, int], scores: list[float], space_prefix: bool = True) -> list[int]:
    """SentencePiece BPE: join the neighbours whose result scores best, the leftmost of equals; bytes for the rest."""
    text = text.replace(" ", "▁")
    parts = list("▁" + text if space_prefix and text else text)
    while True:
        best, score = -1, float("-inf")
        for i in range(len(parts) - 1):
            found = vocab.get(parts[i] + parts[i + 1])
            if found is not None and scores[found] > score:
                best, score = i, scores[found]
        if best < 0:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    ids = []
    for part in parts:
        if part in vocab:
            ids.append(vocab[part])
        else:
            ids += [vocab[f"<0x{b:02X}>"] for b in part.encode()]
    return ids
