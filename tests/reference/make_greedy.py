"""Writes smollm2_greedy.json: what transformers answers, greedily and in float32, to the prompts of greedy_prompts.

Run it once (``python tests/reference/make_greedy.py MODEL.gguf``, three to five minutes on two cores); the result is
committed and a rotating share of it is verified again by the tests. Nothing of the engine takes part.

The file: ``prompts``: a list of {name, text, ids, tokens (64 greedy ids, end-of-sequence not honoured), margins (logit
of the best minus that of the second, at each of the 64 positions)}; ``first_logprobs``: prompt name -> the five best
[id, logprob] of the first generated token; ``prompt_logprobs``: prompt name -> natural log probability of each prompt
token given those before it (the first has none and is left out). Compare tokens up to the first position whose margin
is below ``margin_limit``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import smollm2_hf
from greedy_prompts import PROMPTS

TOKENS = 64
MARGIN_LIMIT = 1e-3
FIRST_LOGPROBS = [name for name, _ in PROMPTS[::5] + PROMPTS[2::5]]
PROMPT_LOGPROBS = ["chat-capital", "code-json", "lang-french", "text-wiki", "long-river"]
OUT = Path(__file__).with_name("smollm2_greedy.json")


def greedy(model: Any, ids: list[int], count: int = TOKENS) -> tuple[list[int], list[float], Any]:
    """Greedy tokens, margins, and the logits [len(ids), vocab] of the prompt."""
    import torch

    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=True)
        prompt_logits = out.logits[0]
        tokens: list[int] = []
        margins: list[float] = []
        logits = prompt_logits[-1]
        while True:
            best = torch.topk(logits, 2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            if len(tokens) == count:
                return tokens, margins, prompt_logits
            out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
            logits = out.logits[0, -1]


def main(gguf_path: str) -> None:
    import torch
    import transformers

    model = smollm2_hf.load_model(gguf_path)
    tokenizer = smollm2_hf.load_tokenizer(gguf_path)
    prompts: list[dict[str, Any]] = []
    first: dict[str, list[list[float]]] = {}
    prompt_logprobs: dict[str, list[float]] = {}
    for name, text in PROMPTS:
        began = time.perf_counter()
        ids = tokenizer.encode(text).ids
        tokens, margins, logits = greedy(model, ids)
        if name in FIRST_LOGPROBS:
            top = torch.topk(torch.log_softmax(logits[-1], -1), 5)
            first[name] = [[i, round(v, 5)] for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        if name in PROMPT_LOGPROBS:
            chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            prompt_logprobs[name] = [round(v, 5) for v in chosen.tolist()]
        rounded = [float(f"{m:.3g}") for m in margins]
        prompts.append({"name": name, "text": text, "ids": ids, "tokens": tokens, "margins": rounded})
        print(f"{name}: {len(ids)} tokens, {time.perf_counter() - began:.1f} s, {tokenizer.decode(tokens)[:70]!r}")
    lines = ",\n".join(json.dumps(p, ensure_ascii=False, separators=(",", ":")) for p in prompts)
    head = {
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf, dequantized",
        "sha256": hashlib.sha256(Path(gguf_path).read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "margin_limit": MARGIN_LIMIT,
        "first_logprobs": first,
        "prompt_logprobs": prompt_logprobs,
    }
    OUT.write_text(json.dumps(head, separators=(",", ":"))[:-1] + ',\n"prompts":[\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
