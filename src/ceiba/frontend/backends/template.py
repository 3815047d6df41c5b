"""The seams of a chat template, found by rendering marked conversations.

Owns that search. Must never know how a template is written: it sees rendered text only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ceiba.core.errors import BadRequest

Render = Callable[[list[dict[str, str]], bool], str]
"""(messages, add_generation_prompt) -> text"""


class SeamFinder:
    """Renders conversations whose contents are marks and cuts the text at them; each seam is found once.

    A template may refuse or swallow a system's turn that no user's turn follows, so one is added there. Where a
    template repeats the system's text in a later turn, that turn is rendered without the system, whose text stands
    earlier in the prompt already.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], str] = {}
        self._lock = threading.Lock()

    def seam(self, roles: tuple[str, ...]) -> str:
        with self._lock:
            found = self._known.get(roles)
            if found is None:
                found = self._known[roles] = self._find(roles)
            return found

    def _find(self, roles: tuple[str, ...]) -> str:
        seam = self._cut(roles)
        if "ceiba-mark-" in seam and roles[0] == "system" and len(roles) > 2:
            seam = self._cut(roles[1:])
        if "ceiba-mark-" in seam:
            raise BadRequest(
                f"this model's chat template rewrites earlier turns at {' → '.join(roles)}, so its text cannot grow; "
                "use plain text with gen instead of roles."
            )
        return seam

    def _cut(self, roles: tuple[str, ...]) -> str:
        last = len(roles) - 1
        answering = roles[-1] == "assistant"
        shown = roles[:-1] if answering else roles
        if roles[-1] == "system":
            shown = (*roles, "user")
        text = self._render(_marked(shown), answering)
        start = _after(text, last - 1) if last else 0
        end = len(text) if answering else text.find(_mark(last), start)
        if start < 0 or end < 0:
            raise BadRequest(f"this model's chat template leaves out the content of {' → '.join(roles)}.")
        return text[start:end]


def _mark(index: int) -> str:
    return f"ceiba-mark-{index}-end"


def _marked(roles: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]


def _after(text: str, index: int) -> int:
    mark = _mark(index)
    position = text.rfind(mark)
    return -1 if position < 0 else position + len(mark)
