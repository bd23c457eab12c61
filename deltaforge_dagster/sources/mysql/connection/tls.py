"""TLS contexts for connections to MySQL that continue the previous connection's TLS session.

A source's connections are short, and a complete TLS handshake takes most of their time: 10 ms,
instead of 1 ms if it continues a session. A server that does not know the session (it was
restarted, is another one, or is too old for sessions) answers with a complete handshake, in which
its certificate is verified.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from deltaforge_dagster.sources.mysql.config import MysqlDsn

_State = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and modification time of each file in use; None for an option without a file."""

_CONTEXTS: dict[MysqlDsn, tuple[_State, TlsContext]] = {}


class TlsContext(ssl.SSLContext):
    """A client's TLS context for one server.

    Attributes:
        session: The session that new connections continue; None for a complete handshake.
    """

    session: ssl.SSLSession | None = None

    def wrap_socket(self, sock: socket.socket, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Shake hands on a connected socket, as `ssl.SSLContext.wrap_socket` does."""
        options["session"] = self.session
        return super().wrap_socket(sock, *arguments, **options)


def tls_context(dsn: MysqlDsn) -> TlsContext | None:
    """Return the context that verifies the server as `ssl-mode` says, None for DISABLED.

    It is the same one for each connection with the same DSN, until one of the DSN's files changes.

    Raises:
        OSError: A file of the DSN cannot be used.
    """
    if dsn.ssl_mode == "DISABLED":
        return None
    state = tuple(_state(path) for path in tls_files(dsn).values())
    cached = _CONTEXTS.get(dsn)
    if cached is None or cached[0] != state:
        cached = _CONTEXTS[dsn] = state, _new_context(dsn)
    return cached[1]


def tls_files(dsn: MysqlDsn) -> dict[str, str | None]:
    """Return the files that are used, by the option of the DSN; None for an option without one."""
    authority = dsn.ssl_ca if _verifies(dsn) else None
    return {"ssl-ca": authority, "ssl-cert": dsn.ssl_cert, "ssl-key": dsn.ssl_key}


def _verifies(dsn: MysqlDsn) -> bool:
    return dsn.ssl_mode in {"VERIFY_CA", "VERIFY_IDENTITY"}


def _state(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    status = Path(path).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _new_context(dsn: MysqlDsn) -> TlsContext:
    context = TlsContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = dsn.ssl_mode == "VERIFY_IDENTITY"
    if _verifies(dsn):
        context.load_verify_locations(dsn.ssl_ca)
    else:
        context.verify_mode = ssl.CERT_NONE
    if dsn.ssl_cert:
        context.load_cert_chain(dsn.ssl_cert, dsn.ssl_key)
    return context
