"""Errors that reach a client or an operator. Each names the thing, the limit and the way out."""

from __future__ import annotations


class CeibaError(Exception):
    """Base of every error that is ours to explain.

    ``status`` is the HTTP status the front answers with, ``kind`` OpenAI's ``error.type``, ``code`` its
    machine-readable ``error.code`` and ``param`` the field at fault.
    """

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(CeibaError):
    """The request can never be served as it stands (400)."""

    status = 400
    kind = "invalid_request_error"


class Unauthorized(CeibaError):
    status = 401
    kind = "authentication_error"


class Forbidden(CeibaError):
    status = 403
    kind = "permission_error"


class NotFound(CeibaError):
    status = 404
    kind = "not_found_error"


class TooLarge(CeibaError):
    """The body is over the byte limit (413)."""

    status = 413
    kind = "invalid_request_error"


class TooSlow(CeibaError):
    """The client stopped in the middle of its request (408)."""

    status = 408
    kind = "invalid_request_error"


class Overloaded(CeibaError):
    """The queue is full: try again after ``retry_after`` seconds (503)."""

    status = 503
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after: int = 1, code: str | None = "queue_full") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(CeibaError):
    """The engine is starting, stopping or has lost a process (503)."""

    status = 503
    kind = "service_unavailable_error"


class DeadlineExceeded(CeibaError):
    """The request waited or ran longer than its own limit allows (504)."""

    status = 504
    kind = "timeout_error"


class EngineFault(CeibaError):
    """A request failed inside the engine and only that request (500)."""


class ConfigError(CeibaError):
    """A flag, environment variable or model that this start cannot work with; the process says so and exits."""

    status = 500
    kind = "configuration_error"


class CheckpointError(ConfigError):
    """A model file that is damaged, hostile or of a kind we do not read."""
