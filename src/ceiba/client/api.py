"""The calls of the API, written once: ``Client`` performs them asynchronously, ``SyncClient`` at once.

Owns names, arguments and meaning of the calls. Must never send: ``_perform`` and ``_open`` belong to the two clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ceiba.client import answers, content
from ceiba.client.answers import Reader, Text
from ceiba.client.events import ChatDeltas, Deltas, NativeDeltas
from ceiba.client.exchange import Call, RetryPolicy
from ceiba.core.errors import BadRequest

DEFAULT_URL = "http://127.0.0.1:30000"


class Api:
    """What both clients can do. With ``Client`` await each call; with ``SyncClient`` it returns its result.

    ``url``: where the server listens; a trailing ``/v1`` is left out. ``api_key`` goes with every request,
    ``admin_api_key`` with those that change the server's state (default: ``api_key``). ``model``: the name sent where
    a call gives none. ``timeout``: seconds without a byte before RequestTimeout. ``retries``: further attempts when
    the server is full or not reachable; its ``Retry-After`` is obeyed up to ``longest_wait`` seconds.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        admin_api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        retries: int = 2,
        longest_wait: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = base_url(url)
        self.model = model
        self._key = api_key
        self._admin_key = admin_api_key or api_key
        self._timeouts = (timeout, connect_timeout)
        self._policy = RetryPolicy(retries, longest_wait=longest_wait)
        self._headers = dict(headers or {})

    # ── performed by the clients ─────────────────────────────────────────────

    def _perform(self, call: Call) -> Any:
        raise NotImplementedError

    def _open(self, call: Call, deltas: Deltas, read: Reader | None) -> Any:
        raise NotImplementedError

    # ── generating ───────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        model: str | None = None,
        structured_output: Any = None,
        response_format: Mapping[str, Any] | None = None,
        images: Sequence[str | bytes] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Continue ``prompt`` as it stands, without a chat template: a ``Text``, or a list for a list or for n > 1.

        ``structured_output``: a Pydantic model (or dataclass, TypedDict, msgspec Struct): its schema constrains the
        answer, and an instance comes back; a JSON schema gives the parsed value. ``response_format``: as in OpenAI's
        API; the answer is JSON text. ``images``: bytes, base64 or URLs; the prompt then goes through the chat
        template, which knows where images belong. ``stream``: an iterator of text pieces. ``fields``: sampling
        parameters by their native or OpenAI name (max_tokens, temperature, stop, regex, …) and the other fields of
        /generate (rid, return_logprob, …).

        Raises the errors of ``core.errors`` that the server names, InvalidOutput, ConnectionFailed, RequestTimeout.
        """
        form = content.Format(structured_output, response_format)
        many = not (prompt is None or isinstance(prompt, str))
        if images:
            if not isinstance(prompt, str):
                raise BadRequest("images go with a single text prompt.", param="images")
            message = content.image_message(prompt, images)
            return self._chat([message], model, form, stream, content.openai_names(fields))
        body = content.native_body(list(prompt) if many and prompt else prompt, fields, form, stream)
        name = model or self.model
        if name:
            body["model"] = name
        if stream:
            if many or (body["sampling_params"].get("n") or 1) > 1:
                raise BadRequest("stream=True gives one text: send one prompt with n=1.", param="stream")
            return self._open(Call("POST", "/generate", body, stream=True), NativeDeltas(), form.read)

        def parse(value: Any) -> Any:
            if isinstance(value, list):
                return [_read(answers.native_text(entry), form.read) for entry in value]
            return _read(answers.native_text(value), form.read)

        return self._perform(Call("POST", "/generate", body, parse))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        model: str | None = None,
        structured_output: Any = None,
        response_format: Mapping[str, Any] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """The next turn of a conversation through the model's chat template: a ``Text``, or a list for n > 1.

        ``messages``: OpenAI's form, or one string for a single user message. ``fields``: further fields of
        /v1/chat/completions (max_tokens, temperature, tools, chat_template_kwargs, …). The rest as for ``generate``.
        """
        form = content.Format(structured_output, response_format)
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        return self._chat(listed, model, form, stream, content.openai_names(fields))

    def _chat(
        self,
        messages: list[dict[str, Any]],
        model: str | None,
        form: content.Format,
        stream: bool,
        fields: dict[str, Any],
    ) -> Any:
        name = model or self.model or "default"
        body = {"model": name, "messages": messages, **fields, **form.openai()}
        path = "/v1/chat/completions"
        if stream:
            if fields.get("n", 1) != 1:
                raise BadRequest("stream=True gives one text: leave n at 1.", param="stream")
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return self._open(Call("POST", path, body, stream=True), ChatDeltas(), form.read)

        def parse(value: Any) -> Any:
            texts = [_read(text, form.read) for text in answers.chat_texts(value)]
            return texts if fields.get("n", 1) != 1 else texts[0]

        return self._perform(Call("POST", path, body, parse))

    def embeddings(self, input: str | Sequence[str], *, model: str | None = None, **fields: Any) -> Any:
        """Vectors of texts: an ``Embedding`` for one text, a list for a list. ``fields``: dimensions, …"""
        many = not isinstance(input, str)
        body = {"model": model or self.model or "default", "input": list(input) if many else input, **fields}
        if fields.get("encoding_format", "float") != "float":
            raise BadRequest("vectors come back as floats: leave encoding_format out.", param="encoding_format")

        def parse(value: Any) -> Any:
            vectors = answers.embedding_list(value)
            return vectors if many else vectors[0]

        return self._perform(Call("POST", "/v1/embeddings", body, parse))

    # ── tokens ───────────────────────────────────────────────────────────────

    def tokenize(self, prompt: str | Sequence[str], *, add_special_tokens: bool = True) -> Any:
        """Token ids: a list of ints for a text, a list of lists for a list."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": given, "add_special_tokens": add_special_tokens}
        return self._perform(Call("POST", "/v1/tokenize", body, lambda value: value["tokens"]))

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> Any:
        body = {"tokens": list(tokens), "skip_special_tokens": skip_special_tokens}
        return self._perform(Call("POST", "/v1/detokenize", body, lambda value: value["text"]))

    # ── the server ───────────────────────────────────────────────────────────

    def models(self) -> Any:
        """Names of the models that the server has."""
        return self._perform(Call("GET", "/v1/models", None, lambda value: [card["id"] for card in value["data"]]))

    def model_info(self) -> Any:
        return self._perform(Call("GET", "/model_info"))

    def server_info(self) -> Any:
        return self._perform(Call("GET", "/server_info"))

    def health(self, *, generate: bool = False) -> Any:
        """{status: ok | starting | stuck | failed | stopping, reason?}; ``generate`` proves it with one token.

        A server that is not well answers too; only one that cannot be reached raises.
        """
        path = "/health_generate" if generate else "/health"
        return self._perform(Call("GET", path, accept=frozenset({503})))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> Any:
        """End the request that was sent with ``rid``, or all. How many choices were still open. Needs the admin key."""
        if not rid and not abort_all:
            raise BadRequest("abort needs a rid, or abort_all=True.", param="rid")
        body = {"abort_all": True} if abort_all else {"rid": rid}
        return self._perform(Call("POST", "/abort_request", body, lambda value: value["aborted"], admin=True))

    def flush_cache(self) -> Any:
        """Forget all cached prefixes. Needs the admin key."""
        return self._perform(Call("POST", "/flush_cache", None, admin=True))

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, admin: bool = False) -> Any:
        """Any other route of the server, with keys, retries and typed errors: its answer, decoded."""
        return self._perform(Call(method, path, body, admin=admin))


def _read(text: Text, read: Reader | None) -> Any:
    return text if read is None else read(text)


def base_url(url: str) -> str:
    """``url`` with a scheme and without a trailing slash or ``/v1``."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadRequest(f"{url!r} is no http(s) address, such as {DEFAULT_URL}.", param="url")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
