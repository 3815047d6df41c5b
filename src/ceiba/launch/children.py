"""Entry points of the child processes: ``python -m ceiba.launch.children ROLE STATUS_FD``.

Owns what every child must do before its work (die with its parent, leave Ctrl-C to it, report start-up) and the wiring
of each role. Reads its configuration from standard input; imports torch only in the roles that need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from ceiba.config.records import Config, SchedulerConfig
from ceiba.core.errors import CeibaError
from ceiba.core.step import Runner, RunnerInfo
from ceiba.launch.starting import DETOKENIZER, SCHEDULER
from ceiba.launch.status import Failed, Ready, StatusWriter, read_frame
from ceiba.launch.torch_import import import_torch
from ceiba.launch.zmq_ports import Endpoints

if TYPE_CHECKING:
    from ceiba.checkpoint.base import Checkpoint
    from ceiba.checkpoint.packed_cache import PackedCache
    from ceiba.grammar.base import Vocabulary
    from ceiba.grammar.provider import Provider
    from ceiba.scheduler.grammar import GrammarProvider
    from ceiba.spec.base import Drafter

_PR_SET_PDEATHSIG = 1


class Boot(msgspec.Struct, frozen=True):
    """The first message to a child."""

    config: Config
    endpoints: Endpoints


def main(argv: list[str]) -> None:
    role, status_fd = argv[0], int(argv[1])
    status = StatusWriter(status_fd)
    _prepare()
    try:
        if role == SCHEDULER:
            # Before the configuration is looked for: it may still be in the making.
            with status.phase("torch"):
                import_torch()
        boot = msgspec.msgpack.decode(read_frame(0), type=Boot)
    except EOFError:
        os._exit(1)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    run = {SCHEDULER: run_scheduler, DETOKENIZER: run_detokenizer}[role]
    try:
        run(boot, status)
    except CeibaError as error:
        status.send(Failed(error.message))
        _leave(2)
    except BaseException as error:
        traceback.print_exc()
        status.send(Failed(f"{role}: {type(error).__name__}: {error}", expected=False))
        _leave(1)
    _leave(0)


def _prepare() -> None:
    if sys.platform == "linux":  # elsewhere, and for a parent that died before this line, the pipe's end serves
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Writing gigabytes of KV pool to a core file would hide an abort from the parent for as long as it takes.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()


def _die_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _leave(code: int) -> None:
    """End without waiting for threads that may be inside a kernel or a socket's linger."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_scheduler(boot: Boot, status: StatusWriter) -> None:
    """Brain and muscle in one process: the loop, the cache and the model of one rank."""
    config = boot.config
    if config.model.task != "generate":
        run_pooling(boot, status)
        return
    with status.phase("open"):
        from ceiba.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(config.model.path, config.model.load_format, progress=False)
        packed = open_packed(config, checkpoint)
    with status.phase("import"):
        from ceiba.launch.zmq_ports import ZmqSchedulerPort
        from ceiba.obs import logs
        from ceiba.runner.tiers import make_tiers
        from ceiba.runner.worker import ModelRunner
        from ceiba.scheduler.loop import Scheduler
    logs.setup(config.obs, SCHEDULER)
    with status.phase("load"):
        runner = ModelRunner(config, checkpoint, packed=packed)
        tiers = make_tiers(config, checkpoint, runner.pool)
    port = ZmqSchedulerPort(boot.endpoints)
    # The scheduler gives back only handles and states that these two made, which the protocols cannot say.
    grammar = make_grammar(config, runner.info)
    scheduler = Scheduler(
        config.scheduler,
        cast(Runner, runner),
        port,
        grammar=cast("GrammarProvider | None", grammar),
        tiers=tiers,
        drafter=make_drafter(config.scheduler),
    )
    status.send(Ready(msgspec.to_builtins(runner.info)))
    try:
        scheduler.run(port.to_front)
    finally:
        if tiers is not None:
            tiers.close()
        runner.close()
        if grammar is not None:
            grammar.close()


def open_packed(config: Config, checkpoint: Checkpoint) -> PackedCache | None:
    """What an earlier start packed of this checkpoint: read and checked while torch is being imported."""
    if not config.runner.packed_cache or not checkpoint.files or checkpoint.load_format == "dummy":
        return None
    from ceiba.checkpoint.packed_cache import PackedCache, identity_of
    from ceiba.kernels import cpu

    held = {"quantization": config.model.quantization, "dtype": config.model.dtype}
    build = Path(cpu._cpu.__file__).read_bytes()
    return PackedCache(Path(config.runner.packed_cache), identity_of(checkpoint.files, build, held))


def run_pooling(boot: Boot, status: StatusWriter) -> None:
    """The scheduler's place where the model gives numbers: a queue and an encoder."""
    config = boot.config
    with status.phase("import"):
        import torch

        from ceiba.checkpoint import open_checkpoint
        from ceiba.launch.zmq_ports import ZmqPoolingPort
        from ceiba.models.bert import load_bert
        from ceiba.models.loader import DTYPES
        from ceiba.obs import logs
        from ceiba.runner.pooling import PoolingLoop
        from ceiba.scheduler.heartbeat import HeartbeatThread
    logs.setup(config.obs, SCHEDULER)
    runner = config.runner
    with status.phase("load"):
        on_cpu = runner.device == "cpu"
        if on_cpu:
            torch.set_num_threads(max(1, runner.threads))
        checkpoint = open_checkpoint(config.model.path, config.model.load_format, progress=False)
        device = torch.device("cpu") if on_cpu else torch.device(runner.device, runner.gpu_id)
        model = load_bert(checkpoint, DTYPES[config.model.dtype], device)
        checkpoint.close()
    port = ZmqPoolingPort(boot.endpoints)
    loop = PoolingLoop(model, port, config.scheduler.max_prefill_tokens)
    status.send(Ready({"vocab_size": model.vocab_size, "context_len": model.max_length, "device": runner.device}))
    with HeartbeatThread(port.to_front, loop.latest):
        loop.run()


def make_grammar(config: Config, info: RunnerInfo) -> Provider | None:
    """Structured output for this model. The tokenizer is loaded when the first constraint comes: starting costs
    nothing."""
    if config.grammar.backend == "none" or config.model.skip_tokenizer:
        return None
    from ceiba.grammar.provider import Provider

    def vocabulary() -> Vocabulary:
        from ceiba.grammar.vocabulary import make_vocabulary
        from ceiba.launch.wiring import open_tokenizer

        return make_vocabulary(open_tokenizer(config), info.vocab_size, info.eos_ids)

    return Provider(config.grammar, vocabulary)


def make_drafter(config: SchedulerConfig) -> Drafter | None:
    """Who guesses tokens for speculative decoding, if anybody does."""
    if config.speculative_algorithm is None:
        return None
    from ceiba.spec.ngram import NgramDrafter

    return NgramDrafter(config.ngram_longest)


def run_detokenizer(boot: Boot, status: StatusWriter) -> None:
    """Ids to text, in a process of its own."""
    with status.phase("import"):
        from ceiba.launch.wiring import make_detokenizer, open_tokenizer
        from ceiba.launch.zmq_ports import ZmqDetokenizerPort
        from ceiba.obs import logs
    logs.setup(boot.config.obs, DETOKENIZER)
    port = ZmqDetokenizerPort(boot.endpoints)
    with status.phase("load tokenizer"):
        detokenizer = make_detokenizer(boot.config, open_tokenizer(boot.config))
    status.send(Ready())
    detokenizer.run(port, threading.Event())
