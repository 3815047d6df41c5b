"""Files and batches: the real openai SDK over loopback, restarts, and names that would leave the folder (HAZARD 26)."""

from __future__ import annotations

import asyncio
import json
import os

import httpx
import openai
import pytest

from ceiba.core import limits
from ceiba.core.errors import ConfigError
from ceiba.server.files.store import FileStore, shown_name
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config, text_for
from support.front_world import make_world
from support.http_server import serving, wait_until

CHAT = "/v1/chat/completions"


def line(name, url=CHAT, **body):
    body = {"model": "m", "messages": [{"role": "user", "content": name}], "max_tokens": 5, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")

    def make():
        engine = FakeEngine(0.0002)
        config = make_config(file_storage_path=str(folder), api_key="key")
        return Front(config, ByteTokenizer(), PlainTemplate(), engine), engine

    with serving(make) as made:
        yield (*made, folder)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="key", max_retries=0) as client:
        yield client


def ended(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in {"completed", "failed", "cancelled"}, 20)
    return client.batches.retrieve(batch.id)


def test_a_file_comes_back_as_it_was(client):
    made = client.files.create(file=("a name.jsonl", b"one\ntwo\n"), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (8, "a name.jsonl", "batch")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"one\ntwo\n"
    assert made.id in [f.id for f in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_a_batch_runs_to_the_end(client, server):
    names = [f"q{i}" for i in range(40)]
    lines = [line(n) for n in names] + [line("bad", max_tokens=0), line("stream", stream=True)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"who": "me"})
    assert batch.status in {"validating", "in_progress"}
    done = ended(client, batch)
    assert done.status == "completed", done
    assert done.metadata == {"who": "me"}
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (42, 40, 2)
    answers = [json.loads(x) for x in client.files.content(done.output_file_id).text.splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(names)
    for answer in answers:
        assert answer["response"]["status_code"] == 200
        said = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert said == text_for(list(f"<user>{answer['custom_id']}\n<assistant>".encode()), None)[:5]
    refused = [json.loads(x) for x in client.files.content(done.error_file_id).text.splitlines()]
    assert sorted(a["custom_id"] for a in refused) == ["bad", "stream"]
    assert all(a["response"]["status_code"] == 400 for a in refused)
    assert server[1].idle
    assert batch.id in [b.id for b in client.batches.list()]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
    ],
)
def test_other_endpoints(client, url, body):
    text = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}})
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    done = ended(client, batch)
    assert done.request_counts.completed == 1, done


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no request"),
        ("{", "not a request"),
        (line("a", url="/v1/completions"), "must be POST"),
        (line("a") + "\n" + line("a"), "twice"),
        (line("x" * 257), "custom_id"),
        (json.dumps({"custom_id": "a", "method": "GET", "url": CHAT, "body": {}}), "must be POST"),
    ],
)
def test_a_file_that_is_no_batch_fails_with_the_line(client, text, match):
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = ended(client, batch)
    assert done.status == "failed"
    assert match in done.errors.data[0].message


def test_what_cannot_be_a_batch_is_refused(client):
    data = client.files.create(file=("in.jsonl", line("a").encode()), purpose="user_data")
    good = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    for fields in (
        {"input_file_id": data.id},
        {"input_file_id": good.id, "endpoint": "/v1/moderations"},
        {"input_file_id": good.id, "completion_window": "1h"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**{"endpoint": CHAT, "completion_window": "24h", **fields})
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-" + "0" * 32, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_..%2f..%2fx")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b""), purpose="nonsense")


def test_a_batch_is_cancelled_and_keeps_its_answers(client, server):
    engine = server[1]
    engine.step_seconds = 0.02
    try:
        file = client.files.create(
            file=("in.jsonl", "\n".join(line(f"{i}", max_tokens=20) for i in range(200)).encode()), purpose="batch"
        )
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        engine.frozen = True  # it does not end before it is cancelled
        with pytest.raises(openai.BadRequestError, match="cancel"):
            client.files.delete(file.id)
        done = client.batches.cancel(batch.id)
    finally:
        engine.step_seconds, engine.frozen = 0.0002, False
    assert done.status == "cancelled"
    kept = client.files.content(done.output_file_id).text.splitlines()
    assert len(kept) == done.request_counts.completed < 200
    wait_until(lambda: engine.idle)


async def test_a_batch_goes_on_after_a_restart_and_asks_nothing_twice(tmp_path):
    config = make_config(file_storage_path=str(tmp_path))
    names = [f"n{i}" for i in range(60)]
    async with make_world(config, step_seconds=0.02) as world:
        files = {"file": ("in.jsonl", "\n".join(line(n) for n in names).encode())}
        made = await world.client.post("/v1/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": made.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await world.client.post("/v1/batches", json=body)).json()["id"]
        while True:
            state = (await world.client.get(f"/v1/batches/{batch}")).json()
            if state["request_counts"]["completed"] >= 5:
                break
            await asyncio.sleep(0.005)
        world.front.fail("killed")
        await asyncio.sleep(0.05)
    state = json.loads((tmp_path / "batches" / f"{batch}.json").read_text())
    assert state["status"] == "in_progress"
    output = tmp_path / "files" / state["output_file_id"]
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < 60
    output.write_bytes(before + b'{"id": "cut off')
    async with make_world(config) as world:
        while (state := (await world.client.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
            assert state["status"] == "in_progress", state
            await asyncio.sleep(0.01)
        text = (await world.client.get(f"/v1/files/{state['output_file_id']}/content")).content
        assert text.startswith(before)
        assert sorted(json.loads(x)["custom_id"] for x in text.splitlines()) == sorted(names)
        assert state["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert len(world.engine.received) == 60 - before.count(b"\n")


async def test_a_full_queue_makes_a_batch_wait(tmp_path, monkeypatch):
    async with make_world(make_config(file_storage_path=str(tmp_path))) as world:
        world.engine.max_waiting = 0
        files = {"file": ("in.jsonl", line("a").encode())}
        made = await world.client.post("/v1/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": made.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await world.client.post("/v1/batches", json=body)).json()["id"]
        await asyncio.sleep(0.1)
        assert (await world.client.get(f"/v1/batches/{batch}")).json()["status"] == "in_progress"
        world.engine.max_waiting = None
        for _ in range(2000):
            state = (await world.client.get(f"/v1/batches/{batch}")).json()
            if state["status"] == "completed":
                break
            await asyncio.sleep(0.01)
        assert state["request_counts"]["completed"] == 1


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a/../../b", "..\\..\\x", "x\x00y", "con\n", "é" * 500],
)
async def test_names_never_leave_the_folder(tmp_path, name):
    """HAZARD 26 (CVE-2026-7302)."""
    folder = tmp_path / "inside"
    async with make_world(make_config(file_storage_path=str(folder))) as world:
        boundary = "xyz"
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        tail = f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}--\r\n'
        reply = await world.client.post(
            "/v1/files",
            content=head.encode() + b"data" + tail.encode(),
            headers={"content-type": f"multipart/form-data; boundary={boundary}"},
        )
        assert reply.status_code in {200, 400}
    outside = [p for p in tmp_path.rglob("*") if folder not in p.parents and p != folder]
    assert outside == []
    for path in folder.rglob("*"):
        assert path.is_dir() or path.name == ".lock" or path.name.startswith("file-")


@pytest.mark.parametrize(
    "wild", ["..%2f..%2fetc%2fpasswd", "../batches/x", "file-" + "0" * 31 + "g", "%2e%2e", "file-"]
)
async def test_ids_never_leave_the_folder(tmp_path, wild):
    (tmp_path / "secret").write_text("secret")
    async with make_world(make_config(file_storage_path=str(tmp_path / "inside"))) as world:
        for path in (f"/v1/files/{wild}", f"/v1/files/{wild}/content", f"/v1/batches/{wild}"):
            request = world.client.build_request("GET", "http://server/")
            request.url = httpx.URL("http://server", raw_path=path.encode())
            reply = await world.client.send(request)
            assert reply.status_code in {403, 404}, path
            assert "secret" not in reply.text


async def test_files_are_off_without_a_folder(world):
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")):
        reply = await world.client.request(method, path)
        assert reply.status_code == 400
        assert "--file-storage-path" in reply.json()["error"]["message"]


async def test_a_file_over_the_limit_is_413_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 1000)
    async with make_world(make_config(file_storage_path=str(tmp_path))) as world:
        files = {"file": ("big", b"x" * 1001)}
        reply = await world.client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert reply.status_code == 413
        assert list((tmp_path / "files").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_at_start(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="--file-storage-path"):
        FileStore(blocked)


def test_shown_names():
    assert shown_name("../../a.jsonl") == "a.jsonl"
    assert shown_name("..") == shown_name("") == shown_name(None) == "file"
    assert len(shown_name("x" * 1000)) == limits.MAX_ID_CHARS
    assert os.sep not in shown_name("a/b\\c")


async def test_one_folder_belongs_to_one_server(tmp_path):
    config = make_config(file_storage_path=str(tmp_path))
    async with make_world(config):
        with pytest.raises(ConfigError, match="another server uses this folder"):
            FileStore(tmp_path)
    FileStore(tmp_path).close()


def test_a_batch_of_refusals_leaves_the_loop_to_others(client, server):
    """Lines that are refused without waiting for anything must not hold up who comes beside."""
    lines = "\n".join(line(f"r{i}", max_tokens=-1) for i in range(6000))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    seen = set()
    while True:
        now = client.batches.retrieve(batch.id)
        if now.status not in {"in_progress", "validating"}:
            break
        seen.add(now.request_counts.failed)
    assert ended(client, batch).request_counts.failed == 6000
    assert len(seen - {0, 6000}) >= 2, "it was answered about while the lines were refused"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (line("deep").replace('"m"', "[" * 5000 + "]" * 5000), "nested deeper"),
        (line("long").replace('"m"', '"' + "x" * limits.MAX_BODY_BYTES + '"'), "the limit is"),
    ],
    ids=["deep", "long"],
)
def test_a_line_has_the_bounds_of_a_body(client, body, why):
    file = client.files.create(file=("in.jsonl", f"{line('good')}\n{body}\n".encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = ended(client, batch)
    assert done.status == "failed"
    assert done.errors.data[0].line == 2
    assert why in done.errors.data[0].message
