"""A receiver for webhooks.yaml: verifies signatures, drops repetitions, prints each change.

    WEBHOOK_SECRET=... python examples/workers/webhook_receiver.py --port 8080

A real receiver stores the idempotency keys in the same transaction as what it does with the change.
This one remembers the last hundred thousand.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOST_AGE = 300
"""Seconds after which a signature no longer counts, so that no old request can be repeated."""

MOST_KEYS = 100_000


def verified(secret: bytes, header: str, body: bytes, now: float) -> bool:
    """Return whether a header `t=<seconds>,v1=<hex>` signs a body, and not too long ago."""
    fields = dict(part.split("=", 1) for part in header.split(",") if "=" in part)
    seconds = fields.get("t", "")
    if not seconds.isdecimal() or abs(now - int(seconds)) > MOST_AGE:
        return False
    expected = hmac.new(secret, seconds.encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected, fields.get("v1", ""))


class Receiver(ThreadingHTTPServer):
    """Serves on this machine only."""

    daemon_threads = True

    def __init__(self, port: int, secret: bytes) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.secret = secret
        self.seen: dict[str, None] = {}

    def is_new(self, key: str) -> bool:
        """Remember an idempotency key; return whether it was unknown."""
        if key in self.seen:
            return False
        self.seen[key] = None
        if len(self.seen) > MOST_KEYS:
            del self.seen[next(iter(self.seen))]
        return True


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    server: Receiver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Accept a change: 204 means that it need not be sent again, also if it was known."""
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        signed = self.headers.get("deltaforge-signature", "")
        if not verified(self.server.secret, signed, body, time.time()):
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        if self.server.is_new(self.headers["idempotency-key"]):
            event = json.loads(body)
            line = {"path": self.path, "op": event["op"], "after": event["after"]}
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
        self._answer(HTTPStatus.NO_CONTENT)

    def log_message(self, *_: object) -> None:
        """Say nothing on the standard error."""

    def _answer(self, status: HTTPStatus) -> None:
        self.send_response(status)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("content-length", "0")
        self.end_headers()


def main() -> None:
    """Serve until somebody ends the process."""
    parser = argparse.ArgumentParser(description="Receive signed webhooks.")
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    with Receiver(arguments.port, os.environ["WEBHOOK_SECRET"].encode()) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
