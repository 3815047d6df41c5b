"""A client for Ceiba servers: ``from ceiba import client; c = client.Client("http://127.0.0.1:30000")``.

Owns the Python face of the HTTP API. Stands apart from the engine: it imports ``core`` alone and speaks HTTP.
"""

from ceiba.client.answers import Embedding, Text, Usage
from ceiba.client.clients import AsyncStream, Client, Stream, SyncClient
from ceiba.client.errors import ConnectionFailed, InvalidOutput, RequestTimeout, ServerError

__all__ = [
    "AsyncStream",
    "Client",
    "ConnectionFailed",
    "Embedding",
    "InvalidOutput",
    "RequestTimeout",
    "ServerError",
    "Stream",
    "SyncClient",
    "Text",
    "Usage",
]
