"""The backend that programs use when none is given, and what else may stand for a backend.

Owns the one value that ``set_default_backend`` sets.
"""

from __future__ import annotations

from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.base import Backend


class _Default:
    backend: Backend | None = None


def as_backend(value: Any) -> Backend:
    """A backend as it is; a ``ceiba.Engine`` or a server's URL as one. Raises BadRequest for anything else."""
    if isinstance(value, str):
        from ceiba.frontend.backends.http import RuntimeEndpoint

        return RuntimeEndpoint(value)
    if hasattr(value, "score") and hasattr(value, "seam"):
        return value
    if hasattr(value, "generate") and hasattr(value, "render"):
        from ceiba.frontend.backends.engine import EngineBackend

        return EngineBackend(value)
    raise BadRequest(f"{type(value).__name__} is no backend: give RuntimeEndpoint(url), Runtime(model) or an Engine.")


def set_default_backend(backend: Any) -> None:
    """For every program of this process that is run without ``backend=``. None takes it back."""
    _Default.backend = None if backend is None else as_backend(backend)


def chosen(backend: Any = None) -> Backend:
    """``backend``, else the default. Raises BadRequest when there is neither."""
    if backend is not None:
        return as_backend(backend)
    if _Default.backend is None:
        raise BadRequest(
            'no backend: call ceiba.set_default_backend(ceiba.RuntimeEndpoint("http://127.0.0.1:30000")), or give '
            "run(…, backend=…)."
        )
    return _Default.backend


def flush_cache(backend: Any = None) -> Any:
    """Forget the cached prefixes of ``backend`` or the default one."""
    return chosen(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    return chosen(backend).server_info()
