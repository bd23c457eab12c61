"""One connection to a NATS server, used for blocks of messages and for occasional requests.

Blocks (`pack`) are sent as they are; `answers` parses what the server sends. All answers
arrive on one subscription, on subjects that begin with the link's own random inbox.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import AuthFailed, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.connections import TimedOut, timed, too_late
from deltaforge_dagster.sinks.nats.answers import Answers
from deltaforge_dagster.sinks.nats.link import Address, Login, server_error
from deltaforge_dagster.sinks.nats.pack import PackedMessages

_PIECE = 1 << 18
"""Bytes handed to the socket at once: small enough that the timeout measures progress."""

_MAX_INFO = 1 << 20
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


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
        return int(self.info.get("max_payload", 1 << 20))

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
