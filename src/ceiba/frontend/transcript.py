"""What a state has said so far, as one growing text and as messages.

Owns the text of a conversation. Turns are joined by *seams*: what the model's chat template writes between the end of
one turn's content and the start of the next, asked of the backend for the roles so far and put in once. So the text
only grows, each prompt is a prefix of the next, and the server's tree holds all but the new part. A seam is looked up
when the text is needed, not before.
"""

from __future__ import annotations

from typing import Any, Protocol

from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.base import Prompt


class Seams(Protocol):
    def seam(self, roles: tuple[str, ...]) -> str:
        """What stands before the content of the last of ``roles``, after the content of the one before."""


class Transcript:
    def __init__(self) -> None:
        self._done = ""
        self._pending: list[str | tuple[str, ...]] = []
        """Contents and seams that ``_done`` does not have yet."""
        self._messages: list[dict[str, Any]] = []
        self._roles: tuple[str, ...] = ()
        self._open: str | None = None
        self._images = False

    def copy(self) -> Transcript:
        twin = Transcript()
        twin._done, twin._pending = self._done, [*self._pending]
        twin._messages = [{**message, "content": _copied(message["content"])} for message in self._messages]
        twin._roles, twin._open, twin._images = self._roles, self._open, self._images
        return twin

    def begin(self, role: str) -> None:
        if self._open is not None:
            raise BadRequest(f"{role} begins inside the turn of {self._open}: end that one first.")
        self._open = role
        self._roles = (*self._roles, role)
        self._pending.append(self._roles)
        self._messages.append({"role": role, "content": ""})

    def end(self, role: str) -> None:
        if self._open != role:
            raise BadRequest(f"the turn of {role} ends, but {self._open or 'no turn'} is open.")
        self._open = None

    def add(self, text: str) -> None:
        if not text:
            return
        self._pending.append(text)
        if self._open is not None:
            message = self._messages[-1]
            if isinstance(message["content"], str):
                message["content"] += text
            elif message["content"][-1]["type"] == "text":
                message["content"][-1]["text"] += text
            else:
                message["content"].append({"type": "text", "text": text})

    def add_image(self, url: str) -> None:
        if self._open is None:
            raise BadRequest("an image belongs into a turn: s += user(image(…) + 'text').", param="image")
        self._images = True
        message = self._messages[-1]
        if isinstance(message["content"], str):
            text = message["content"]
            message["content"] = [{"type": "text", "text": text}] if text else []
        message["content"].append({"type": "image_url", "image_url": {"url": url}})

    def absorb(self, branch: Transcript, base: Transcript, seams: Seams) -> str:
        """Add, and return, the text that ``branch`` has beyond ``base``, its own seams included."""
        added = branch.text(seams)[len(base.text(seams)) :]
        if added:
            self._pending.append(added)
        if self._messages and base._messages:
            before, now = base._messages[-1]["content"], branch._messages[len(base._messages) - 1]["content"]
            mine = self._messages[-1]
            if isinstance(before, str) and isinstance(now, str) and isinstance(mine["content"], str):
                mine["content"] += now[len(before) :]
        self._messages += branch.copy()._messages[len(base._messages) :]
        self._roles += branch._roles[len(base._roles) :]
        self._open = branch._open
        self._images = self._images or branch._images
        return added

    @property
    def has_images(self) -> bool:
        return self._images

    def messages(self) -> list[dict[str, Any]]:
        """The turns in OpenAI's form; text outside of turns is no part of it."""
        return self.copy()._messages

    def text(self, seams: Seams) -> str:
        """The whole text, with the template's markers. Raises the backend's error where there is no template."""
        while self._pending:
            piece = self._pending[0]
            self._done += piece if isinstance(piece, str) else seams.seam(piece)
            self._pending.pop(0)
        return self._done

    def prompt(self, seams: Seams, as_messages: bool) -> Prompt:
        """For the backend: a text, or (with images, and for backends that take nothing else) messages."""
        continued = self._open == "assistant"
        if not as_messages and not self._images:
            return Prompt(text=self.text(seams), templated=bool(self._roles))
        if not continued:
            raise BadRequest("the model answers inside the turn of the assistant: s += assistant(gen(…)).")
        messages = self.messages()
        if not messages[-1]["content"]:
            messages.pop()
            continued = False
        return Prompt(messages=messages, continued=continued)


def _copied(content: Any) -> Any:
    return content if isinstance(content, str) else [dict(part) for part in content]
