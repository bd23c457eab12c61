"""Which addresses are connected to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.sinks.http.client import ClientSettings, is_public
from deltaforge_dagster.sinks.http.requests import RequestForm
from deltaforge_dagster.sinks.http.sink import HttpSink
from deltaforge_dagster.testing.sinks import allow, messages
from deltaforge_lab.servers.http import HttpServer


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("::ffff:93.184.216.34", True),
        ("127.0.0.1", False), ("::1", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False), ("::", False),
        ("224.0.0.1", False), ("ff02::1", False), ("255.255.255.255", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    """Those of this machine, its networks and the cloud's metadata are none."""
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_private_server_is_not_called(http_server: HttpServer, host: str) -> None:
    """Neither by its address nor by a name that resolves to it; with permission it is."""
    url = http_server.url.replace("127.0.0.1", host)
    rows = messages([(f"{url}/secret-path", "1")])
    refused = HttpSink("out", RequestForm(), ClientSettings(allow_private=False))
    refused.open()
    with pytest.raises(SinkRejected, match=f"{host} has a private.*allow_private: true") as caught:
        refused.send(rows, allow)
    with pytest.raises(SinkRejected, match="private"):
        refused.reach(url)
    refused.close()
    assert "secret-path" not in str(caught.value)
    assert http_server.received == []

    allowed = HttpSink("out", RequestForm(), ClientSettings(allow_private=True))
    allowed.open()
    allowed.send(rows, allow)
    allowed.close()
    assert len(http_server.received) == 1


def test_the_address_that_was_checked_is_the_one_connected_to(
    http_server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is resolved once for a connection; one that changes its mind afterwards gains nothing."""
    port = int(http_server.url.rpartition(":")[2])
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    tried: list[Any] = []

    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        assert host == "rebinding.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers.pop(0)]

    def connect(_: socket.socket, address: Any) -> None:
        tried.append(address)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("deltaforge_dagster.sinks.http.client.connect", connect)
    sink = HttpSink("out", RequestForm(), ClientSettings(allow_private=False))
    sink.open()
    with pytest.raises(SinkRejected, match="has a private"):
        sink.send(messages([(f"http://rebinding.example:{port}/", "1")]), allow)
    sink.close()

    assert tried == [("93.184.216.34", port)]
    assert http_server.received == []


def test_only_public_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with both kinds is called at its public ones."""
    both = ["127.0.0.1", "93.184.216.34"]
    tried: list[Any] = []

    def connect(_: socket.socket, address: Any) -> None:
        tried.append(address[0])
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 80)) for one in both],
    )
    monkeypatch.setattr("deltaforge_dagster.sinks.http.client.connect", connect)
    sink = HttpSink("out", RequestForm(), ClientSettings(allow_private=False))
    sink.open()
    with pytest.raises(Exception, match="refused"):
        sink.reach("http://both.example/")
    sink.close()

    assert tried == ["93.184.216.34"]
