"""Open a connection to PostgreSQL, authenticate, and return its socket.

libpq returns a replication stream one message at a time; reading the socket into large buffers is
faster. This module opens the socket and wraps it in TLS; pg8000 does start-up and authentication
(manual: "Frontend/Backend Protocol", "Start-up"). After that, the socket has no unread bytes, and
belongs to the caller.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pg8000.dbapi
from pg8000.exceptions import DatabaseError

from deltaforge_dagster.folders import unreadable_file

_UNREACHABLE = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
)
ONLY_IPV6 = (
    "the host has only IPv6 addresses, which this machine cannot reach; "
    "give the machine IPv6, or the database an IPv4 address"
)
"""The reason why a host that has no IPv4 address cannot be reached."""

# The message's length, and 1234 and 5679 in place of the two halves of a protocol's version.
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)


class RefusedError(Exception):
    """The server answered with an error."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(sqlstate, message)
        self.sqlstate = sqlstate
        self.message = message


class UnreachableError(Exception):
    """The handshake with a server failed; the text says why."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS options of the DSN (manual: "SSL Support" of libpq)."""

    mode: str
    root: str | None
    certificate: str | None
    key: str | None

    def context(self) -> ssl.SSLContext:
        """Return a TLS context that verifies the server as `mode` (`sslmode`) says.

        Raises:
            UnreachableError: A file cannot be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.mode == "verify-full"
        root = self.root or str(Path("~/.postgresql/root.crt").expanduser())
        verifies = self.mode.startswith("verify-") or (
            self.mode == "require" and Path(root).exists()
        )
        needed = {"sslrootcert": root if verifies and self.root != "system" else None}
        unreadable = unreadable_file(
            {
                **needed,
                "sslcert": self.certificate,
                "sslkey": self.key if self.certificate else None,
            }
        )
        if unreadable is not None:
            raise UnreachableError(f"TLS: {unreadable}")
        if self.root == "system":
            context.check_hostname = True
            context.load_default_certs()
        elif verifies:
            context.load_verify_locations(root)
        else:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """Address, login and options of a connection.

    A `host` that begins with `/` is a directory of Unix sockets.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    options: str
    application_name: str
    tls: Tls | None


def connect(address: ConnectionParameters, seconds: float, *, replication: bool) -> socket.socket:
    """Return the socket of an authenticated session, with a timeout of `seconds`.

    Args:
        address: Address, login and options.
        seconds: Time limit for each step on the network.
        replication: Whether the session accepts replication commands (for `address.database`).

    Raises:
        RefusedError: The server answered with an error.
        UnreachableError: No server answered, or it does not speak PostgreSQL's protocol.
    """
    try:
        connected = _open(address, seconds)
    except OSError as error:
        reason = ONLY_IPV6 if is_only_ipv6(address.host, error) else _reason(error)
        raise UnreachableError(reason) from error
    try:
        session = pg8000.dbapi.connect(
            address.user,
            database=address.database,
            password=address.password,
            application_name=address.application_name,
            replication="database" if replication else None,
            startup_params={"options": address.options} if address.options else None,
            sock=connected,
            ssl_context=False,  # done already: pg8000 gives no access to a socket that it wraps
        )
        # pg8000's file object refers to the socket and would keep it open after its `close`.
        session._sock.close()  # noqa: SLF001
    except Exception as error:  # noqa: BLE001 - a bad handshake may make pg8000 raise anything
        connected.close()
        refusal = _refusal(error)
        if refusal is not None:
            raise refusal from None
        raise UnreachableError(f"the handshake failed ({type(error).__name__})") from None
    return connected


def is_only_ipv6(host: str, error: OSError) -> bool:
    """Return whether a connection failed because the host has only IPv6 addresses.

    This machine then has no route to them, or the connection timed out.
    """
    if not (isinstance(error, TimeoutError) or error.errno in _UNREACHABLE):
        return False
    try:
        families = {family for family, *_ in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return families == {socket.AF_INET6}


def error_fields(body: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse by their letters (`C` is SQLSTATE, `M` the text)."""
    fields = (field.decode(errors="replace") for field in body.split(b"\0") if field)
    return {field[0]: field[1:] for field in fields}


def _open(address: ConnectionParameters, seconds: float) -> socket.socket:
    if address.host.startswith("/"):
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(seconds)
            connected.connect(
                os.path.join(address.host, f".s.PGSQL.{address.port}")  # noqa: PTH118
            )
        except BaseException:
            connected.close()
            raise
        return connected
    connected = socket.create_connection((address.host, address.port), seconds)
    try:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected if address.tls is None else _with_tls(connected, address.tls, address.host)
    except BaseException:
        connected.close()
        raise


def _with_tls(connected: socket.socket, tls: Tls, host: str) -> socket.socket:
    connected.sendall(_SSL_REQUEST)
    if connected.recv(1) != b"S":
        raise UnreachableError("the server does not support TLS, which the DSN demands")
    return tls.context().wrap_socket(connected, server_hostname=host)


def _refusal(error: BaseException) -> RefusedError | None:
    """Return the server's error, if any; pg8000 may replace it by a later error while closing."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DatabaseError) and cause.args and isinstance(cause.args[0], dict):
            fields = cause.args[0]
            return RefusedError(fields.get("C", ""), fields.get("M", ""))
        cause = cause.__context__
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name is unknown"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's TLS certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror or type(error).__name__).lower()
