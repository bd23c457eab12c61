"""ClickHouse's engine from the package `chdb`, behind the HTTP interface of a ClickHouse server.

The engine is ClickHouse's. The HTTP server around it is ours, and follows the documentation of the
interface: login, `database`, settings as parameters, the data of an INSERT as the body, status and
`X-ClickHouse-Exception-Code` of errors. Queries are executed one after another, and there is one
user, who has every privilege.

Program: ``python -m deltaforge_lab.servers.clickhouse_http PORT DIRECTORY``, with the password in
the environment variable `CLICKHOUSE_PASSWORD`.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

USER = "default"
PASSWORD_VARIABLE = "CLICKHOUSE_PASSWORD"  # noqa: S105 - the name of a variable

_OF_INTERFACE = {
    "query", "database", "user", "password", "query_id", "session_id", "session_timeout",
    "default_format", "wait_end_of_query", "compress", "decompress", "enable_http_compression",
    "role", "client_protocol_version",
}  # fmt: skip
"""Parameters that are no settings."""

_INSERT = re.compile(
    r"^(?P<start>\s*INSERT\s.*)\sFORMAT\s+(?P<format>\w+)\s*$", re.IGNORECASE | re.DOTALL
)
_INPUT = re.compile(r"\binput\('((?:[^'\\]|\\.)*)'\)")
_CODE = re.compile(r"Code: (\d+)\.")
_STATUS = {
    516: HTTPStatus.FORBIDDEN,
    497: HTTPStatus.FORBIDDEN,
    60: HTTPStatus.NOT_FOUND,
    81: HTTPStatus.NOT_FOUND,
    62: HTTPStatus.BAD_REQUEST,
}


class ClickhouseEngine:
    """The engine, used by one request at a time.

    Args:
        directory: Where its tables are.
    """

    def __init__(self, directory: Path) -> None:
        from chdb import session  # noqa: PLC0415 - half a gigabyte

        make: Any = session.Session
        self._session: Any = make(str(directory))
        self._lock = threading.Lock()

    def execute(self, query: str, parameters: Mapping[str, str], data: bytes) -> bytes:
        """Return the answer to a query; `data` are those of an INSERT.

        Raises:
            RuntimeError: The engine refuses the query.
        """
        settings = {name: value for name, value in parameters.items() if name not in _OF_INTERFACE}
        form = parameters.get("default_format", "TabSeparated")
        with self._lock, self._set(parameters.get("database", "default"), settings):
            if not data:
                return self._query(query, form)
            with tempfile.NamedTemporaryFile() as file:
                file.write(data)
                file.flush()
                return self._query(_from_file(query, file.name), form)

    @contextlib.contextmanager
    def _set(self, database: str, settings: Mapping[str, str]) -> Iterator[None]:
        self._query(f"USE `{database}`")
        applied = []
        try:
            for name, value in settings.items():
                self._query(f"SET {name} = '{_escaped(value)}'")
                applied.append(name)
            yield
        finally:
            for name in applied:
                self._query(f"SET {name} = DEFAULT")

    def _query(self, query: str, form: str = "TabSeparated") -> bytes:
        answer = self._session.query(query, form)
        return b"" if answer is None else bytes(answer.bytes())


def _from_file(query: str, path: str) -> str:
    """Return an INSERT that reads its data from a file."""
    match = _INSERT.match(query)
    if match is None:
        return query
    start, form = match["start"], match["format"]
    if _INPUT.search(start):
        return _INPUT.sub(lambda call: f"file('{path}', '{form}', '{call[1]}')", start)
    return f"{start} FROM INFILE '{path}' FORMAT {form}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


class ClickhouseInterface(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    engine: ClickhouseEngine
    password: str

    def do_GET(self) -> None:
        """Answer a query in the URL, or say that the server is up."""
        if dict(parse_qsl(urlsplit(self.path).query)).get("query"):
            self.do_POST()
        else:
            self._answer(HTTPStatus.OK, b"Ok.\n")

    def do_POST(self) -> None:
        """Answer a query."""
        parameters = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        body = self._body()
        query, data = parameters.get("query"), body
        if query is None:
            query, data = body.decode(), b""
        if not self._is_authenticated(parameters):
            text = (
                f"Code: 516. DB::Exception: {USER}: Authentication failed. (AUTHENTICATION_FAILED)"
            )
            self._refuse(text)
            return
        try:
            answer = self.engine.execute(query, parameters, data)
        except RuntimeError as error:
            self._refuse(str(error))
        else:
            self._answer(
                HTTPStatus.OK,
                answer,
                {"X-ClickHouse-Timezone": "UTC", "X-ClickHouse-Summary": "{}"},
            )

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: queries may hold values."""

    def _is_authenticated(self, parameters: Mapping[str, str]) -> bool:
        scheme, _, encoded = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            user, _, key = base64.b64decode(encoded).decode("latin-1").partition(":")
        else:
            user = self.headers.get("X-ClickHouse-User") or parameters.get("user") or USER
            key = self.headers.get("X-ClickHouse-Key") or parameters.get("password") or ""
        return user == USER and hmac.compare_digest(key.encode("latin-1"), self.password.encode())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _refuse(self, text: str) -> None:
        match = _CODE.search(text)
        code = int(match[1]) if match else 1002
        status = _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._answer(status, text.encode(), {"X-ClickHouse-Exception-Code": str(code)})

    def _answer(
        self, status: HTTPStatus, content: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main(port: int, directory: Path) -> None:
    """Serve until the process ends."""
    ClickhouseInterface.engine = ClickhouseEngine(directory)
    ClickhouseInterface.password = os.environ[PASSWORD_VARIABLE]
    with ThreadingHTTPServer(("127.0.0.1", port), ClickhouseInterface) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
