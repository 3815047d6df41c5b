"""What a program sees: its state, and the branches it forks into.

Owns the surface of both. Running the steps is ``execute``'s part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.frontend.execute import Executor, Slot, parsed
from ceiba.frontend.expr import Expr, RoleBegin, RoleEnd, as_expr


class ProgramState:
    """``s += expression`` adds; ``s["name"]`` is a variable's text, waiting for it where it is on its way."""

    ret_value: Any = None
    """What the program's function returned."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __iadd__(self, other: Expr | str) -> ProgramState:
        self._executor.submit(as_expr(other))
        return self

    # ── variables ────────────────────────────────────────────────────────────

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError for an unknown name, and the error of the step that should have set it."""
        return self._slot(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        self._executor.slots[name] = Slot(value)

    def __contains__(self, name: object) -> bool:
        return name in self._executor.slots

    get_var = __getitem__
    set_var = __setitem__

    def parsed(self, name: str) -> Any:
        """The variable as the int, float, bool, string or JSON value that its ``gen`` asked for."""
        return parsed(self._slot(name))

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the backend said about the step: token counts, cached_tokens, finish_reason, log-probabilities."""
        return self._slot(name).meta

    @property
    def variables(self) -> dict[str, Any]:
        """All variables, once they are there."""
        return {name: self[name] for name in list(self._executor.slots)}

    def _slot(self, name: str) -> Slot:
        found = self._executor.slots.get(name)
        if found is None:
            known = ", ".join(self._executor.slots) or "none"
            raise KeyError(f"no variable {name!r}; there are: {known}")
        return found.wait()

    # ── what was said ────────────────────────────────────────────────────────

    def text(self) -> str:
        """Everything so far, with the chat template's markers between the turns."""
        self._executor.sync()
        if self._executor.backend.messages_only:
            return "".join(f"{m['role']}: {_plain(m['content'])}\n" for m in self.messages())
        return self._executor.transcript.text(self._executor.backend)

    def messages(self) -> list[dict[str, Any]]:
        """The turns in OpenAI's form."""
        self._executor.sync()
        return self._executor.transcript.messages()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """With ``run(stream=True)``: text as it comes, one variable's or all (constants too, without markers)."""
        if not self._executor.streaming:
            yield str(self[var_name]) if var_name is not None else self.text()
            return
        yield from self._executor.pieces(var_name)

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """``text_iter`` for a running event loop."""
        pieces = self.text_iter(var_name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def sync(self) -> None:
        """Wait for all steps. Raises the first error."""
        self._executor.sync()

    def error(self) -> BaseException | None:
        """What went wrong, once the steps are done; None where nothing did."""
        with contextlib.suppress(BaseException):
            self._executor.sync()
        return self._executor.error

    # ── turns ────────────────────────────────────────────────────────────────

    def system(self, content: Expr | str | None = None) -> contextlib.AbstractContextManager[ProgramState]:
        """``s.system("…")``, or ``with s.system(): …``; likewise user and assistant."""
        return self._turn("system", content)

    def user(self, content: Expr | str | None = None) -> contextlib.AbstractContextManager[ProgramState]:
        return self._turn("user", content)

    def assistant(self, content: Expr | str | None = None) -> contextlib.AbstractContextManager[ProgramState]:
        return self._turn("assistant", content)

    def _turn(self, role: str, content: Expr | str | None) -> contextlib.AbstractContextManager[ProgramState]:
        if content is None:
            return _Turn(self, role)
        self._executor.submit(RoleBegin(role) + as_expr(content) + RoleEnd(role))
        return contextlib.nullcontext(self)

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[ProgramState]:
        """Everything added inside becomes variable ``name``."""
        self._executor.sync()
        start = len(self.text())
        yield self
        self[name] = self.text()[start:]

    # ── branches ─────────────────────────────────────────────────────────────

    def fork(self, size: int = 1) -> ForkGroup:
        """``size`` branches from here; they run at the same time. Their common text is cached first."""
        if size < 1:
            raise BadRequest(f"fork into {size} branches; at least 1.")
        branches = [ProgramState(branch) for branch in self._executor.fork(size)]
        return ForkGroup(self, branches)

    @contextlib.contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """``with s.copy() as t``: a branch for trying something; nothing comes back from it."""
        yield ProgramState(self._executor.fork(1)[0])


class _Turn:
    def __init__(self, state: ProgramState, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> ProgramState:
        self._state._executor.submit(RoleBegin(self._role))
        return self._state

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._state._executor.submit(RoleEnd(self._role))


class ForkGroup:
    """Branches of one state: index them, iterate, add to all with ``+=`` (one expression, or one for each)."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        self._parent = parent
        self._branches = branches
        self._slots = dict(parent._executor.slots)
        self._base = parent._executor.transcript.copy()

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._branches)

    def __getitem__(self, which: int | str) -> Any:
        """A branch by number, or the values of a variable in all branches."""
        if isinstance(which, int):
            return self._branches[which]
        return [branch[which] for branch in self._branches]

    def __setitem__(self, which: int, state: ProgramState) -> None:
        """``forks[i] += …`` ends here; a branch cannot be replaced by another state."""
        if state is not self._branches[which]:
            raise BadRequest("a branch can be added to, not replaced.")

    def __iadd__(self, other: Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]) -> ForkGroup:
        if callable(other):
            other = [other(i) for i in range(len(self))]
        if isinstance(other, Expr | str):
            other = [other] * len(self)
        if len(other) != len(self):
            raise BadRequest(f"{len(other)} expressions for {len(self)} branches.")
        for branch, expr in zip(self._branches, other, strict=True):
            branch += expr
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all branches. Raises the first error.

        ``gather_variable``: the variables that the branches set become lists in the parent. ``concatenate`` (SGLang's
        ``concate_and_append``): what the branches wrote is added to the parent's text, branch after branch.
        """
        for branch in self._branches:
            branch.sync()
        if mode == "gather_variable":
            names = {name: None for branch in self._branches for name in branch._executor.slots}
            for name in names:
                found = [branch._executor.slots.get(name) for branch in self._branches]
                if any(slot is not self._slots.get(name) for slot in found):
                    self._parent[name] = [branch[name] for branch in self._branches if name in branch]
        elif mode in {"concatenate", "concate_and_append"}:
            if self._parent._executor.backend.messages_only:
                raise BadRequest("this backend takes messages only, which cannot be concatenated: gather variables.")
            for branch in self._branches:
                self._parent._executor.absorb(branch._executor, self._base)
        else:
            raise BadRequest(f"join mode {mode!r} is unknown; known: gather_variable, concatenate.")

    def __enter__(self) -> ForkGroup:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.join()


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
