"""A small server of Hrana over HTTP, as its specification says, over a SQLite file; for tests."""

from __future__ import annotations

import base64
import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a-token"


class HranaServer(ThreadingHTTPServer):
    """Answers `POST /v2/pipeline`; every answer has a new baton, an old one is refused.

    Attributes:
        path: The database.
        most_rows: Of an answer, as `RESPONSE_TOO_LARGE` says.
        fails_with: An HTTP status to answer everything with.
        streams: Open streams by their batons.
    """

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.path = path
        self.most_rows = 1_000_000
        self.fails_with: int | None = None
        self.streams: dict[str, sqlite3.Connection] = {}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stream(self, baton: str | None) -> sqlite3.Connection | None:
        """Return the stream of a baton, which can be used once, or a new one."""
        if baton is not None:
            return self.streams.pop(baton, None)
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)

    def run(self, connection: sqlite3.Connection, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request."""
        if request["type"] == "close":
            connection.close()
            return {"type": "ok", "response": {"type": "close"}}
        statement = request["stmt"]
        try:
            found = connection.execute(statement["sql"], list(map(_taken, statement["args"])))
            rows = found.fetchall()
        except sqlite3.Error as error:
            problem = {"message": str(error), "code": error.sqlite_errorname}
            return {"type": "error", "error": problem}
        if len(rows) > self.most_rows:
            problem = {"message": "Response is too large", "code": "RESPONSE_TOO_LARGE"}
            return {"type": "error", "error": problem}
        result = {"cols": [], "rows": [[_given(one) for one in row] for row in rows]}
        return {"type": "ok", "response": {"type": "execute", "result": result}}


class _Handler(BaseHTTPRequestHandler):
    server: HranaServer

    def do_POST(self) -> None:
        """Answer a pipeline of requests."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.fails_with is not None:
            self._answer(self.server.fails_with, {"error": "told to fail"})
            return
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Unauthorized"})
            return
        connection = self.server.stream(body["baton"])
        if self.path != "/v2/pipeline" or connection is None:
            self._answer(400, {"message": "the stream has expired", "code": "STREAM_EXPIRED"})
            return
        results = [self.server.run(connection, request) for request in body["requests"]]
        baton = None
        if body["requests"][-1]["type"] != "close":
            baton = secrets.token_hex(8)
            self.server.streams[baton] = connection
        self._answer(200, {"baton": baton, "base_url": None, "results": results})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has there
        """Say nothing."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _taken(argument: dict[str, Any]) -> Any:
    match argument["type"]:
        case "null":
            return None
        case "integer":
            return int(argument["value"])
        case "blob":
            return base64.b64decode(argument["base64"])
        case _:
            return argument["value"]


def _given(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(value)}
        case float():
            return {"type": "float", "value": value}
        case bytes():
            return {"type": "blob", "base64": base64.b64encode(value).decode().rstrip("=")}
        case _:
            return {"type": "text", "value": value}


@contextmanager
def serving(path: Path) -> Iterator[HranaServer]:
    """Run a server over a file."""
    with HranaServer(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            for connection in server.streams.values():
                connection.close()
