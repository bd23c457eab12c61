"""One connection to a NATS server: blocks of messages, occasional requests, and errors.

Blocks (`pack`) are sent as they are; `answers` parses what the server sends. All answers arrive on
one subscription, on subjects that begin with the link's own random inbox.

Addresses are separated by commas: `nats://host:port`, `tls://host:port` to require TLS, or
`host:port`; the default port is 4222. A user and a password, or a token, may precede the host.

A credentials file (docs.nats.io, "NKeys and JWT", written by `nsc`) holds a user's JWT and the seed
of an Ed25519 key in base32 with a checksum. The server sends a nonce, and the user proves its
identity by signing it: the seed never leaves the process.

JetStream answers with an error code (nats-server, `errors.json`), the server itself with an `-ERR`
line (docs.nats.io, "Client Protocol"). Either one decides whether it helps to wait and retry.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)
from deltaforge_dagster.sinks.connections import TimedOut, timed, too_late
from deltaforge_dagster.sinks.nats.answers import Answers
from deltaforge_dagster.sinks.nats.pack import PackedMessages

_PORT = 4222
_BLOCK = re.compile(r"-{3,}BEGIN ([^-]+)-{3,}\s*(\S+)\s*-{3,}END")
_USER_SEED = 18 << 3, 20 << 3
"""Prefix bytes of a seed, and of one that belongs to a user (`S` and `U` in base32)."""

WRONG_SEQUENCE = frozenset([10071, 10164])
"""The last sequence of the stream or the subject is not the one that the message expects."""
WRONG_MESSAGE = 10070
"""The stream's last message is not the one that the message expects."""
NOBODY_LISTENS = 503
"""A status, not a JetStream code: nobody listens to the subject."""
TOO_LARGE = 10054  # JSStreamMessageExceedsMaximumErr
NOT_THIS_STREAM = 10060  # JSStreamNotMatchErr
NO_STREAM = 10059  # JSStreamNotFoundErr
NO_MESSAGE = 10037  # JSNoMessageFoundErr
NOT_ENABLED = frozenset([10039, 10076])  # for the account, on the server

_STORE_FAILED = 10077  # JSStreamStoreFailedF, whose text has the reason
_TRANSIENT = frozenset(
    [
        10002,  # the account's resources are used up
        10008,  # the cluster is choosing a leader
        10023,  # the server's resources are used up
        10028,  # its memory
        10047,  # its disk
        10074,  # a replica is missing
        10118,  # the stream is offline
        10163,  # a message before this one is still being stored
        10167,  # more is waiting to be stored than the server keeps
        10194,  # the stream is offline, with a reason
    ]
)

_QUOTED = re.compile(r"'(.*)'", re.DOTALL)
_PERMISSION = re.compile(r"(?i)permissions violation for (publish|subscription) to (\S+)")

_PIECE = 1 << 18
"""Bytes handed to the socket at once: small enough that the timeout measures progress."""

_MAX_INFO = 1 << 20  # the line is read by the byte, and a server that is none may never end it
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER, 0 s: what is unsent is dropped, not sent


class NatsLink:
    """A connection, opened by `connect`.

    Args:
        sink_id: Name of the sink in messages.
        address: Address of the server.
        name: Name of the connection on the server.
        connect_timeout: Seconds for connecting and logging in.
        send_timeout: Seconds after which a server that neither takes nor sends a byte is given up.

    Attributes:
        where: Names of sink and server, prefix of messages.
        inbox: Prefix of the subjects for answers; a dot and the message's number follow.
        answers: Parser of everything that the server sends.
        info: The server's INFO (docs.nats.io, "Client Protocol", section INFO).
        usable: Whether the link is connected and nothing has failed.
        sending: Whether something was sent that has not been answered.
    """

    def __init__(
        self, sink_id: str, address: Address, name: str, connect_timeout: float, send_timeout: float
    ) -> None:
        self.where = f"sink {sink_id}: {address}"
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        self.answers = Answers(len(self.inbox) + 1)
        self.info: Mapping[str, Any] = {}
        self.usable = False
        self.sending = False
        self._address = address
        self._name = name
        self._connect_timeout = connect_timeout
        self._send_timeout = send_timeout
        self._sock: socket.socket | None = None

    @property
    def max_payload(self) -> int:
        """Maximum size of a message's headers and payload together."""
        return int(self.info.get("max_payload", 1 << 20))  # the server's default

    def connect(self, login: Login) -> None:
        """Connect and log in.

        Raises:
            SinkUnavailable: The server cannot be reached, or does not answer in time.
            AuthFailed: Credentials or a certificate refused.
            SettingsError: The credentials file cannot be read or is invalid.
            SinkRejected: The server does not support TLS or headers, or is not a NATS server.
        """
        deadline = time.monotonic() + self._connect_timeout
        address = (self._address.host, self._address.port)
        try:
            self._sock = socket.create_connection(address, self._connect_timeout)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.info = self._read_info()
            self._secure()
            self._sock.sendall(self._first_commands(login))
        except TimeoutError as error:
            raise TimedOut(
                f"{self.where} did not answer within {self._connect_timeout:g} s "
                "(connect_timeout_secs)"
            ) from error
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise SinkUnavailable(f"{self.where}: connection lost: {error}") from error
            raise AuthFailed(f"{self.where}: TLS failed: {error}") from error
        except OSError as error:
            raise SinkUnavailable(f"{self.where}: {error}") from error
        self._receive_until(lambda: self.answers.pongs > 0, deadline)
        self.usable = True

    def transmit(self, data: memoryview | bytes, deadline: float) -> None:
        """Send commands; `deadline` is a monotonic time."""
        self.sending = True
        with self._socket(deadline) as next_socket:
            view = memoryview(data)
            sent = 0
            while sent < len(view):
                sent += next_socket().send(view[sent : sent + _PIECE])

    def send_block(self, block: PackedMessages, deadline: float) -> None:
        """Send a block whose messages the stream answers."""
        self.answers.expect(block.answers)
        self.transmit(block.data, deadline)

    def await_answers(self, number: int, deadline: float) -> None:
        """Wait until all messages before `number` have been answered."""
        self._receive_until(lambda: self.answers.first_missing >= number, deadline)
        self.sending = self.answers.first_missing < self.answers.next_number

    def flush(self, deadline: float) -> None:
        """Wait until the server has read everything that was sent."""
        wanted = self.answers.pongs + 1
        self.transmit(b"PING\r\n", deadline)
        self._receive_until(lambda: self.answers.pongs >= wanted, deadline)
        self.sending = False

    def request(self, subject: str, question: object, seconds: float) -> dict[str, Any]:
        """Send a request, such as one of JetStream's API, while no message awaits its answer.

        Returns:
            The JSON object in the answer; `{"error": ...}` if nobody listens to the subject.
        """
        deadline = time.monotonic() + seconds
        body = b"" if question is None else orjson.dumps(question)
        head = f"PUB {subject} {self.inbox}.r {len(body)}\r\n".encode()
        self.transmit(head + body + b"\r\n", deadline)
        self._receive_until(lambda: self.answers.reply is not None, deadline)
        self.sending = False
        reply = self.answers.take_reply() or b""
        if reply.startswith(b"NATS/"):
            return {"error": {"err_code": 503, "description": "nobody answers"}}
        try:
            answer: dict[str, Any] = orjson.loads(reply)
        except ValueError as error:
            raise SinkUnavailable(f"{self.where}: an answer that is no JSON") from error
        return answer

    def poll(self) -> None:
        """Process what has arrived meanwhile: a PING, or the server's closing of the connection."""
        if self._sock is None:
            return
        with self._socket(time.monotonic() + self._send_timeout):
            self._sock.settimeout(0)
            try:
                while True:
                    self._take_received(self._sock.recv_into(self.answers.space()))
            except (BlockingIOError, ssl.SSLWantReadError):
                pass

    def interrupt(self) -> None:
        """Make calls in another thread fail that are waiting for the server."""
        with contextlib.suppress(OSError):
            if (sock := self._sock) is not None:
                # Not the TLS socket's own method: it would discard the other thread's state.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; what has not left yet never will."""
        self.usable = False
        with contextlib.suppress(OSError):
            if (sock := self._sock) is not None:
                if self.sending:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                sock.close()

    def _read_info(self) -> Mapping[str, Any]:
        """Read the server's first line, byte by byte, because TLS may follow it."""
        assert self._sock is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            piece = self._sock.recv(1) if len(line) < _MAX_INFO else b""
            if not piece:
                raise ConnectionResetError("the server closed it")
            line += piece
        if line.startswith(b"-ERR"):
            raise server_error(self.where, line.decode("utf-8", "replace").strip())
        try:
            name, _, text = line.partition(b" ")
            if name != b"INFO":
                raise ValueError  # noqa: TRY301
            info: Mapping[str, Any] = orjson.loads(text)
        except ValueError:
            raise SinkRejected(f"{self.where} is not a NATS server") from None
        if not info.get("headers"):
            raise SinkRejected(f"{self.where} has no headers: NATS 2.2 or newer is needed")
        return info

    def _secure(self) -> None:
        """Switch to TLS if the server or the address requires it."""
        assert self._sock is not None
        offered = self.info.get("tls_required") or self.info.get("tls_available")
        if not (self.info.get("tls_required") or self._address.tls):
            return
        if not offered:
            raise SinkRejected(
                f"{self.where} offers no TLS, which tls:// asks for; enable it there, or write "
                "nats://"
            )
        context = ssl.create_default_context()
        self._sock = context.wrap_socket(self._sock, server_hostname=self._address.host)

    def _first_commands(self, login: Login) -> bytes:
        options = {
            "verbose": False,
            "pedantic": False,
            "tls_required": isinstance(self._sock, ssl.SSLSocket),
            "name": self._name,
            "lang": "python",
            "version": __version__,
            "protocol": 1,
            "echo": False,
            "headers": True,
            "no_responders": True,
            **login.fields(self._address, str(self.info.get("nonce", ""))),
        }
        return b"CONNECT %b\r\nSUB %b.* 1\r\nPING\r\n" % (
            orjson.dumps(options),
            self.inbox.encode(),
        )

    def _receive_until(self, done: Callable[[], bool], deadline: float) -> None:
        with self._socket(deadline) as next_socket:
            while not done():
                self._take_received(next_socket().recv_into(self.answers.space()))
        self._raise_error()

    def _take_received(self, size: int) -> None:
        if size == 0:
            raise ConnectionResetError("the server closed it")
        self.answers.received(size)
        self._raise_error()
        if pings := self.answers.take_pings():
            assert self._sock is not None
            self._sock.sendall(b"PONG\r\n" * pings)

    def _raise_error(self) -> None:
        if self.answers.error is not None:
            raise server_error(self.where, self.answers.error)

    @contextlib.contextmanager
    def _socket(self, deadline: float) -> Iterator[Callable[[], socket.socket]]:
        """Yield a function that returns the socket with its next timeout; translate failures."""
        sock = self._sock
        if sock is None:
            raise SinkUnavailable(f"{self.where}: not connected")

        try:
            yield partial(timed, sock, deadline, self._send_timeout)
        except TimeoutError as error:
            self.usable = False
            raise too_late(self.where, self._send_timeout) from error
        except OSError as error:
            if isinstance(error, BlockingIOError | ssl.SSLWantReadError):
                raise
            self.usable = False
            if (line := self._last_words()) is not None:
                raise server_error(self.where, line) from error
            raise SinkUnavailable(f"{self.where}: connection lost: {error}") from error
        except BaseException:
            self.usable = False
            raise

    def _last_words(self) -> str | None:
        """Return the error that the server sent before it closed the connection, or None."""
        with contextlib.suppress(OSError, SinkUnavailable):
            assert self._sock is not None
            self._sock.settimeout(0)
            while (size := self._sock.recv_into(self.answers.space())) > 0:
                self.answers.received(size)
        return self.answers.error


@dataclass(frozen=True, slots=True)
class Address:
    """One server: host and port, whether TLS is required, and the credentials in its URL."""

    host: str
    port: int
    tls: bool
    user: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        """Return the server's name for messages, without user and password."""
        return f"nats at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials: the first one of these that is set, or else those in the server's URL.

    Attributes:
        credentials_file: Path of a file with a JWT and a seed.
        username: User name; used together with `password`.
        password: Password; used together with `username`.
        token: Authentication token.
    """

    credentials_file: str | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None

    def fields(self, address: Address, nonce: str) -> dict[str, str]:
        """Return the fields of CONNECT with the credentials (docs.nats.io, "Client Protocol").

        Raises:
            SettingsError: The credentials file cannot be read, or holds something else.
        """
        if self.credentials_file is not None:
            return _signed(Path(self.credentials_file), nonce)
        if self.username is not None and self.password is not None:
            return {"user": self.username, "pass": self.password}
        if self.token is not None:
            return {"auth_token": self.token}
        if address.user is not None and address.password is not None:
            return {"user": address.user, "pass": address.password}
        return {} if address.user is None else {"auth_token": address.user}


def addresses(sink_id: str, urls: str) -> list[Address]:
    """Parse a comma-separated list of server URLs.

    Raises:
        SpecError: The list is invalid.
    """
    try:
        parsed = [_address(url.strip()) for url in urls.split(",")]
    except ValueError:
        # Not chained: the original message can repeat a password.
        raise SpecError(
            f"sink {sink_id}: url is not a list of NATS addresses: expected nats://host:port or "
            "tls://host:port, several with commas, and user and password percent-encoded"
        ) from None
    return parsed


def _address(url: str) -> Address:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    rest = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or rest:
        raise ValueError
    return Address(
        parts.hostname,
        _PORT if parts.port is None else parts.port,
        parts.scheme == "tls",
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )


def _signed(path: Path, nonce: str) -> dict[str, str]:
    try:
        blocks: Mapping[str, str] = dict(_BLOCK.findall(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the NATS credentials file {path} cannot be read: {error}") from error
    jwt = blocks.get("NATS USER JWT")
    seed = blocks.get("USER NKEY SEED")
    key = None if seed is None else _private_key(seed)
    if jwt is None or key is None:
        raise SettingsError(
            f"{path} is not a NATS credentials file: it needs the JWT and the seed of a user, as "
            "`nsc generate creds` writes them"
        )
    signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).rstrip(b"=").decode()
    return {"jwt": jwt, "sig": signature}


def _private_key(seed: str) -> Ed25519PrivateKey | None:
    """Return the key in a user's seed, or None if it is not one.

    A seed consists of two prefix bytes, 32 bytes of the key, and a CRC-16 (XMODEM).
    """
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        return None
    # Two bytes of prefixes, 32 of the seed, and two of the checksum.
    prefix = (raw[0] & 0xF8, (raw[0] & 7) << 5 | raw[1] >> 3) if len(raw) == 36 else None
    if prefix != _USER_SEED or binascii.crc_hqx(raw[:34], 0) != int.from_bytes(raw[34:], "little"):
        return None
    return Ed25519PrivateKey.from_private_bytes(raw[2:34])


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error of JetStream: its code, 0 if there is none, and its text."""

    code: int
    text: str

    @property
    def passes(self) -> bool:
        """Whether the error is transient, so that the same request may succeed later."""
        return self.code in _TRANSIENT or (self.code == _STORE_FAILED and not self.too_large)

    @property
    def too_large(self) -> bool:
        """Whether a message is larger than its stream accepts."""
        return self.code == TOO_LARGE or (self.code == _STORE_FAILED and "too large" in self.text)

    @property
    def sequence(self) -> int | None:
        """The actual sequence that an error of `WRONG_SEQUENCE` names, or None."""
        number = self.text.rpartition(" ")[2]
        return int(number) if self.code in WRONG_SEQUENCE and number.isdecimal() else None


def api_error(text: str) -> ApiError:
    """Parse an answer other than a success: JSON with an error, or a status."""
    if text.startswith("NATS/"):
        status = text.partition("\r")[0].split(" ")
        code = int(status[1]) if len(status) > 1 and status[1].isdecimal() else 0
        return ApiError(code, " ".join(status[1:]))
    try:
        error = orjson.loads(text)["error"]
        return ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(0, "an answer that is none")


def refusal(where: str, error: ApiError) -> DeltaforgeError:
    """Return the `DeltaforgeError` for a refusal that is not due to the message itself."""
    if error.passes:
        return SinkUnavailable(f"{where}: the server refused for now: {error.text}")
    if error.code in NOT_ENABLED:
        return SinkRejected(
            f"{where}: JetStream is not enabled, for the server or for this account; enable it, or "
            "leave out `stream` to publish without storing"
        )
    return SinkRejected(f"{where}: the server refused: {error.text} ({error.code})")


def server_error(where: str, line: str) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an `-ERR` line."""
    match = _QUOTED.search(line)
    text = (match[1] if match else line)[:200]
    lower = text.lower()
    if permission := _PERMISSION.search(text):
        action = "publish to" if permission[1].lower() == "publish" else "subscribe to"
        return PermissionMissing(
            f"{where}: the NATS user may not {action} {permission[2]}; the sink needs to publish "
            "to its subjects and to $JS.API.STREAM.INFO.<stream>, with exactly_once also to "
            "$JS.API.STREAM.MSG.GET.<stream>, and to subscribe to _INBOX.>"
        )
    if "auth" in lower or "credential" in lower:
        return AuthFailed(
            f"{where}: the server refused credentials_file, username, password or token: {text}"
        )
    if any(word in lower for word in ("payload", "control line", "protocol", "subject", "parser")):
        return SinkRejected(f"{where}: the server refused: {text}")
    return SinkUnavailable(f"{where}: the server ended the connection: {text}")
