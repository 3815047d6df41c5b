"""Other people's clients against the real server on the default model: their scripts are in ``clients``, and each runs
in an environment that has nothing of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from live_server import LiveServer
from support.client_env import environment, run, script
from support.http_server import wait_until

CLIENTS = Path(__file__).parent / "clients"
pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def smol():
    with LiveServer("--tool-call-parser", "qwen25", "--enable-response-store") as running:
        yield running


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return environment("clients", tmp_path_factory.mktemp("clients") / "venv")


@pytest.mark.parametrize("client", ["litellm", "langchain", "instructor", "agents"])
def test_a_client_of_openai(client, smol, python):
    script(python, CLIENTS / f"{client}_client.py", smol.url)

    def idle() -> bool:
        state = smol.info()["internal_states"][0]
        return state["running"] == state["waiting"] == 0

    wait_until(idle)  # a client that leaves early is noticed in a moment


def test_the_ai_sdk_for_javascript(smol, tmp_path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        pytest.skip("needs node and npm")
    packages = ["@ai-sdk/openai-compatible@^3", "ai@^7", "zod@^4"]
    made = run(npm, "install", "--no-audit", "--no-fund", "--prefix", tmp_path, *packages, cwd=tmp_path)
    if made.returncode:
        pytest.skip(f"npm cannot install here: {made.stderr[-300:]}")
    shutil.copy(CLIENTS / "ai_sdk.mjs", tmp_path)
    done = run(node, tmp_path / "ai_sdk.mjs", smol.url, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.strip().endswith("ok")


CAPITALS = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid"], 0),
    ("The capital of Germany is", ["Rome", "Berlin", "Lima"], 1),
    ("The opposite of hot is", ["cold", "bread", "seven"], 0),
    ("One, two, three,", ["nine", "four", "zero"], 1),
    ("The sun rises in the", ["west", "north", "east"], 2),
    ("Water is made of hydrogen and", ["iron", "oxygen", "gold"], 1),
]
CHOOSE = """
task: ceiba_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean}}]
"""
WRITE = """
task: ceiba_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean}}]
"""


def test_lm_eval_over_a_local_task(smol, tmp_path):
    """Its verdicts are those of the native route's own log-probabilities and greedy answers."""
    python = environment("evals", tmp_path / "venv")
    data = tmp_path / "task.jsonl"
    rows = [{"text": text, "choices": choices, "label": label} for text, choices, label in CAPITALS]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choose.yaml").write_text(CHOOSE.format(data=data))
    (tmp_path / "write.yaml").write_text(WRITE.format(data=data))
    save_tokenizer(smol, tmp_path / "tokenizer")
    arguments = f"model=smol,base_url={smol.url}/v1/completions,tokenizer={tmp_path / 'tokenizer'},num_concurrent=2"
    words = ["run", "--model", "local-completions", "--model_args", arguments, "--tasks", "ceiba_choose,ceiba_write"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = run(python, "-m", "lm_eval", *words, seconds=1000, cwd=tmp_path, env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    right = [chosen(smol, text, choices) == label for text, choices, label in CAPITALS]
    assert results["ceiba_choose"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert sum(right) >= 4
    (samples,) = (tmp_path / "out").rglob("samples_ceiba_write_*.jsonl")
    written = {s["doc"]["text"]: s["resps"][0][0] for s in map(json.loads, samples.read_text().splitlines())}
    for text, *_ in CAPITALS:
        asked = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "stop": ["\n"]}}
        assert written[text] == smol.post("/generate", asked).json()["text"]


def chosen(server, text, choices):
    """Which choice is the likeliest, by the native route."""
    start = len(server.post("/tokenize", {"prompt": text}).json()["tokens"])
    scores = []
    for choice in choices:
        asked = {"text": f"{text} {choice}", "return_logprob": True, "logprob_start_len": start}
        answer = server.post("/generate", {**asked, "sampling_params": {"max_new_tokens": 0}}).json()
        scores.append(sum(value for value, *_ in answer["meta_info"]["input_token_logprobs"]))
    return scores.index(max(scores))


def save_tokenizer(server, folder):
    """The served model's tokenizer as transformers reads it."""
    from ceiba.checkpoint import open_checkpoint
    from ceiba.text.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(server.get("/model_info").json()["model_path"], progress=False)
    tokenizer = load_tokenizer(checkpoint.tokenizer())
    checkpoint.close()
    folder.mkdir()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": tokenizer.special_tokens["eos_token"], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
