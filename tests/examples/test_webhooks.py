"""The example with HTTP endpoints: the receiver of the page, and a service that takes batches."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from deltaforge_dagster.installation.process import free_port
from deltaforge_lab.servers.http import HttpAnswer, HttpServer
from tests.e2e.deployment import eventually
from tests.examples.stage import EXAMPLES, Play

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]

SECRET = "a secret of this test"


@contextmanager
def receiving(port: int) -> Iterator[subprocess.Popen[str]]:
    """Let the receiver of the example receive."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "workers" / "webhook_receiver.py"), "--port", str(port)],
        env={"WEBHOOK_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            eventually(lambda: _listens(port))
            yield process
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_webhooks(play: Play, http_server: HttpServer) -> None:
    """Each change is a signed request that the receiver accepts; the service gets lines, and refuses one of them."""
    http_server.answer = lambda one: (
        HttpAnswer(422, body=b"no such customer: 99")
        if b'"customer_id":99' in one.body
        else HttpAnswer(202)
    )
    port = free_port()
    with receiving(port) as receiver:
        example = play(
            "webhooks",
            "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, total numeric(10,2))",
            "CREATE TABLE customers (id int PRIMARY KEY, name text)",
            WEBHOOK_URL=f"http://127.0.0.1:{port}",
            WEBHOOK_SECRET=SECRET,
            INGEST_URL=http_server.url,
            INGEST_TOKEN="a token of this test",
        )
        example.change(
            "INSERT INTO customers VALUES (1, 'Zoë')",
            "INSERT INTO orders VALUES (1, 1, 9.50), (2, 99, 1.00), (3, 1, 2.00)",
            "UPDATE orders SET total = 10.00 WHERE id = 1",
            "DELETE FROM orders WHERE id = 3",
        )
        example.deliver()

        assert receiver.stdout is not None
        lines = [json.loads(receiver.stdout.readline()) for _ in range(6)]

    of_orders = [one for one in lines if one["path"] == "/hooks/orders"]
    of_first = [
        one["after"]["total"] for one in of_orders if one["after"] and one["after"]["id"] == 1
    ]
    assert of_first == ["9.50", "10.00"]
    assert [one["op"] for one in of_orders if not one["after"] or one["after"]["id"] == 3] == [
        "c",
        "d",
    ]
    (customer,) = (one for one in lines if one["path"] == "/hooks/customers")
    assert customer["after"] == {"id": 1, "name": "Zoë"}

    accepted = [one for one in http_server.received if one.status == 202]
    assert {one.headers["authorization"] for one in accepted} == {"Bearer a token of this test"}
    assert {one.headers["content-type"] for one in accepted} == {"application/x-ndjson"}
    events = [json.loads(line) for one in accepted for line in one.body.splitlines()]
    rows = [((one["after"] or one["before"])["id"], one["op"]) for one in events]
    assert rows == [(1, "c"), (1, "c"), (3, "c"), (1, "u"), (3, "d")]
    (letter,) = example.store.dead_letters.read(example.loaded.name)
    assert (letter.sink, letter.error_kind) == ("analytics", "serialization")
    phrase = HTTPStatus.UNPROCESSABLE_ENTITY.phrase  # each version of Python has its own
    assert letter.error_message.endswith(f"422 ({phrase}); it said: no such customer: 99")
