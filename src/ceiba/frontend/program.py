"""``@function``: a Python function becomes a program that can be run, run in batches, and streamed.

Owns how programs are started. Must never know what is inside a state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.base import Backend
from ceiba.frontend.backends.default import chosen
from ceiba.frontend.execute import Executor
from ceiba.frontend.primitives import gen
from ceiba.frontend.state import ProgramState

BATCH_THREADS = 96
"""Programs of a batch that run at the same time, unless ``num_threads`` is given: enough to fill a server's batch."""
_SAMPLING = frozenset(inspect.signature(gen).parameters) - {
    "name",
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
}
"""Keywords of ``run`` that are defaults for the program's generations, unless the function has one of that name."""


class Program:
    """A function over a state. Its first argument, ``s``, is given by ``run``."""

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._bound = dict(bound or {})
        self._signature = inspect.signature(function)
        self._names = list(self._signature.parameters)
        if not self._names:
            raise BadRequest(f"{function.__name__} takes no argument: the first one is the state.")
        functools.update_wrapper(self, function)

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Run once and return the state. Raises what the program or its backend raises.

        ``kwargs``: the function's arguments, and sampling defaults (temperature, max_tokens or max_new_tokens, stop,
        …) for generations that do not set their own. ``stream``: return at once; read ``state.text_iter()``.
        """
        sampling, arguments = self._split(kwargs)
        self._check(args, arguments)
        executor = Executor(chosen(backend), sampling, streaming=stream)
        state = ProgramState(executor)
        if stream:
            threading.Thread(
                target=self._quietly, args=(state, args, arguments), name="ceiba-program", daemon=True
            ).start()
            return state
        self._play(state, args, arguments)
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Any = None,
        **kwargs: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """One run per entry (its arguments by name, or the value of a single argument); states in the same order.

        An error ends only its own run: ``state.error()`` has it. ``generator_style``: states come as soon as those
        before them are there. ``kwargs``: sampling defaults.
        """
        sampling, rest = self._split(kwargs)
        if rest:
            raise TypeError(f"run_batch takes no argument {next(iter(rest))!r}: arguments belong into each entry")
        entries = [self._entry(entry) for entry in batch_kwargs]
        for entry in entries:
            self._check((), entry)
        target = chosen(backend)
        threads = BATCH_THREADS if num_threads == "auto" else int(num_threads)
        if threads < 1:
            raise BadRequest(f"num_threads is {num_threads}; at least 1.", param="num_threads")
        states = self._states(target, sampling, entries, threads, progress_bar)
        return states if generator_style else list(states)

    def bind(self, **kwargs: Any) -> Program:
        """The program with some arguments given."""
        unknown = kwargs.keys() - set(self._names[1:])
        if unknown:
            raise TypeError(f"{self._function.__name__} has no argument {min(unknown)!r}")
        return Program(self._function, {**self._bound, **kwargs})

    def __call__(self, s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """As a part of another program: goes on with that one's state."""
        if not isinstance(s, ProgramState):
            raise TypeError(
                f"{self._function.__name__}(s, …) continues a state; to start it, call {self._function.__name__}.run(…)"
            )
        return self._function(s, *args, **{**self._bound, **kwargs})

    # ── inside ───────────────────────────────────────────────────────────────

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(sampling defaults by native name, the function's arguments)"""
        given, arguments = {}, {}
        for name, value in kwargs.items():
            plain = "max_tokens" if name == "max_new_tokens" else name
            if name not in self._names and plain in _SAMPLING:
                given[plain] = value
            else:
                arguments[name] = value
        step = gen(**given) if given else None
        return (dict(getattr(step, "sampling", {})), arguments)

    def _check(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Raises TypeError for arguments that the function does not take, before anything runs."""
        try:
            self._signature.bind(None, *args, **{**self._bound, **arguments})
        except TypeError as error:
            raise TypeError(f"{self._function.__name__}: {error}") from None

    def _entry(self, entry: Any) -> dict[str, Any]:
        if isinstance(entry, Mapping):
            return dict(entry)
        free = [name for name in self._names[1:] if name not in self._bound]
        if len(free) == 1:
            return {free[0]: entry}
        raise BadRequest(f"an entry of run_batch is a mapping of arguments ({', '.join(free)}), not {entry!r}.")

    def _play(self, state: ProgramState, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        executor = state._executor
        try:
            state.ret_value = self._function(state, *args, **{**self._bound, **arguments})
            executor.sync()
        except BaseException as error:
            executor.end(error)
            raise
        executor.end()

    def _quietly(self, state: ProgramState, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """For threads: the error stays in the state."""
        with contextlib.suppress(BaseException):
            self._play(state, args, arguments)

    def _one(self, backend: Backend, sampling: Mapping[str, Any], entry: Mapping[str, Any]) -> ProgramState:
        state = ProgramState(Executor(backend, sampling))
        with contextlib.suppress(Exception):
            self._play(state, (), entry)
        return state

    def _states(
        self,
        backend: Backend,
        sampling: Mapping[str, Any],
        entries: list[dict[str, Any]],
        threads: int,
        progress_bar: bool,
    ) -> Iterator[ProgramState]:
        if not entries:
            return
        pool = ThreadPoolExecutor(min(threads, len(entries)), thread_name_prefix="ceiba-batch")
        try:
            futures = [pool.submit(self._one, backend, sampling, entry) for entry in entries]
            with _progress(self._function.__name__, futures) if progress_bar else contextlib.nullcontext():
                for future in futures:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _progress(title: str, futures: list[Future[ProgramState]]) -> Iterator[None]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=len(futures))
        for future in futures:
            future.add_done_callback(lambda _: bar.advance(task))
        yield


def function(target: Callable[..., Any] | None = None) -> Any:
    """Decorator: ``@function`` makes a program of a function whose first argument is the state."""
    return Program if target is None else Program(target)
