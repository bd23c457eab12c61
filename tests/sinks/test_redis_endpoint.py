"""Reaching Redis: addresses, passwords, permissions, TLS, sockets and sentinels."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.sentinel

from deltaforge_dagster.errors import (
    AuthFailed,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
    SpecError,
)
from deltaforge_dagster.servers.process import ServerProcess, free_port
from deltaforge_dagster.servers.redis import RedisServer
from deltaforge_dagster.sinks import redis as redis_sink
from deltaforge_dagster.sinks.redis import RedisSink
from tests.fix_redis import StartRedis
from tests.sinks.redis_messages import (
    allow,
    batch,
    client_of,
    kernels,
    numbered,
    numbers,
    row,
    server,
)

__all__ = ["kernels", "server"]

pytestmark = pytest.mark.redis


def test_wrong_password(server: RedisServer) -> None:
    """A wrong or missing password is terminal at open, and never in the message."""
    host = server.uri.rpartition("@")[2]
    for user in (":open-sesame@", "", "someone:open-sesame@"):
        with pytest.raises(AuthFailed) as caught:
            RedisSink("cache", f"redis://{user}{host}").open()
        assert "sink cache" in str(caught.value)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://secret@host",
        "redis://:sec/ret@host:6379/0",
        "redis://host/0?socket_timeout=secret",
        "redis://host/0?secret=1",
        "redis+sentinel://host:secret/service",
        "redis+sentinel://host",
        "",
    ],
)
def test_uris_that_are_none(uri: str) -> None:
    """A URI that cannot be read is a mistake in the file; the message does not repeat it."""
    with pytest.raises(SpecError, match="sink cache: uri is not a Redis URI") as caught:
        RedisSink("cache", uri)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_nobody_listens(server: RedisServer) -> None:
    """An unreachable server is retryable, named by its address."""
    with pytest.raises(SinkUnavailable, match=r"sink cache: redis at 127\.0\.0\.1:1: "):
        RedisSink("cache", "redis://:secret@127.0.0.1:1/0").open()


def test_a_database_that_does_not_exist(server: RedisServer) -> None:
    """The server's own words say what is wrong with the database."""
    with pytest.raises(SinkRejected, match="DB index is out of range"):
        RedisSink("cache", server.uri.removesuffix("/0") + "/999").open()


def test_missing_permissions(start_redis: StartRedis) -> None:
    """A user who may not use transactions, a command or a stream gets the grant in the message."""
    server = start_redis()
    host = server.uri.rpartition("@")[2]
    with client_of(server) as client:
        acl = ["on", ">pw", "~s*", "+@connection", "-client"]
        client.execute_command("ACL", "SETUSER", "weak", *acl)
        uri = f"redis://weak:pw@{host}"
        sink = RedisSink("cache", uri)
        with pytest.raises(PermissionMissing, match=r"\+multi"):
            sink.open()
        client.execute_command("ACL", "SETUSER", "weak", "+multi", "+exec")
        sink.open()
        with pytest.raises(PermissionMissing, match=r"\+xadd"):
            sink.send(batch([row(0)]), allow)
        client.execute_command("ACL", "SETUSER", "weak", "+xadd")
        with pytest.raises(PermissionMissing, match="~other"):
            sink.send(batch([row(0), row(1, "other")]), allow)
        assert client.exists("s") == 0
        assert sink.send(batch([row(0)]), allow) == 0
        sink.close()


def test_a_cluster_is_refused() -> None:
    """A Redis Cluster is refused at open, with the reason."""
    with start_cluster() as server, pytest.raises(SinkRejected, match="Redis Cluster"):
        RedisSink("cache", server.uri).open()


def start_cluster() -> RedisServer:
    """Start a cluster of one; its bus needs port + 10000, which not every free port leaves."""
    for _ in range(20):
        with contextlib.suppress(SettingsError):
            return RedisServer.start(settings={"cluster-enabled": "yes"})
    pytest.fail("no port for a cluster")


def test_a_replica_is_unavailable(start_redis: StartRedis) -> None:
    """A replica is retryable: it may become the master."""
    server = start_redis()
    with client_of(server) as client:
        client.replicaof("127.0.0.1", "1")
    with pytest.raises(SinkUnavailable, match="replica"):
        RedisSink("cache", server.uri).open()


def test_close_ends_the_attempts(start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing from another thread ends the waits between attempts."""
    monkeypatch.setattr(redis_sink, "_CONNECT_WAITS", (60,))
    server = start_redis()
    server.stop()
    sink = RedisSink("cache", server.uri)
    closer = threading.Timer(0.05, sink.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(SinkUnavailable):
        sink.open()
    assert time.monotonic() - started < 30
    closer.join()


def test_attempts_to_connect_wait_for_a_restart(
    start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes up between two attempts is not an error."""
    monkeypatch.setattr(redis_sink, "_CONNECT_WAITS", (0.2,) * 100)
    server = start_redis()
    server.stop()
    restart = threading.Timer(0.3, server.restart)
    restart.start()
    sink = RedisSink("cache", server.uri)
    sink.open()
    restart.join()
    assert sink.send(batch([row(0)]), allow) == 0
    sink.close()


def test_sentinel_names_the_master(start_redis: StartRedis, tmp_path: Path) -> None:
    """With a Sentinel URI the sink asks each time where the master is."""
    server = start_redis()
    host, _, port = server.uri.rpartition("@")[2].removesuffix("/0").partition(":")
    password = server.uri.removeprefix("redis://:").partition("@")[0]
    sentinel_port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {sentinel_port}\nbind 127.0.0.1\n"
        f"sentinel monitor orders {host} {port} 1\nsentinel auth-pass orders {password}\n"
    )
    program = Path(f"/proc/{server.pid}/exe").resolve()
    process = ServerProcess(
        "sentinel", [str(program), str(config), "--sentinel"], directory=tmp_path
    )
    try:
        process.wait_until(lambda: sentinel_knows(sentinel_port, "orders"), 30)
        uri = f"redis+sentinel://:{password}@127.0.0.1:1,127.0.0.1:{sentinel_port}/orders/0"
        sink = RedisSink("cache", uri)
        sink.open()
        sink.send(numbered(3), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="No master found for 'unknown'"):
            RedisSink("cache", uri.replace("/orders/", "/unknown/")).open()
    finally:
        process.stop(signal.SIGTERM, 5)

    assert numbers(server) == [0, 1, 2]


def sentinel_knows(port: int, service: str) -> bool:
    """Say whether a Sentinel answers and believes its master to be there."""
    try:
        redis.sentinel.Sentinel([("127.0.0.1", port)]).discover_master(service)
    except redis.ConnectionError:
        return False
    return True


def test_unix_socket(start_redis: StartRedis, tmp_path: Path) -> None:
    """A server on a Unix socket is reached by `unix://`."""
    path = tmp_path / "r.sock"
    server = start_redis({"unixsocket": str(path)})
    password = server.uri.removeprefix("redis://:").partition("@")[0]
    sink = RedisSink("cache", f"unix://:{password}@{path}?db=0")
    sink.open()
    sink.send(numbered(3), allow)
    sink.close()

    assert numbers(server) == [0, 1, 2]


def test_tls(server: RedisServer, tmp_path: Path) -> None:
    """Over `rediss://` the same bytes arrive, and a certificate nobody signed is refused."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    subprocess.run(
        [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    password, _, address = server.uri.removeprefix("redis://:").partition("@")
    with tls_proxy(tmp_path, int(address.partition(":")[2].partition("/")[0])) as port:
        uri = f"rediss://:{password}@127.0.0.1:{port}/0"
        sink = RedisSink("cache", f"{uri}?ssl_ca_certs={tmp_path / 'cert.pem'}")
        sink.open()
        sink.send(numbered(5_000), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            RedisSink("cache", uri).open()

    assert numbers(server) == list(range(5_000))


@contextlib.contextmanager
def tls_proxy(directory: Path, target: int) -> Iterator[int]:
    """Take TLS connections and pass their bytes on to a local port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")

    class Pump(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection(("127.0.0.1", target)) as redis_side,
            ):
                client.setblocking(False)
                while True:
                    select.select([client, redis_side], [], [])
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while data := client.recv(1 << 16):
                            redis_side.sendall(data)
                        return
                    if select.select([redis_side], [], [], 0)[0]:
                        client.setblocking(True)
                        client.sendall(redis_side.recv(1 << 16))
                        client.setblocking(False)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pump) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield proxy.server_address[1]
        proxy.shutdown()
        thread.join()
