"""Reaching Redis: addresses, passwords, permissions, TLS, sockets and sentinels."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

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
from deltaforge_dagster.installation.process import ServerProcess, free_port
from deltaforge_dagster.sinks.redis import sink as redis_sink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.testing.sinks import ORIGIN
from deltaforge_lab.servers.redis import RedisServer
from tests.fix_redis import StartRedis
from tests.sinks.messages import closed_during
from tests.sinks.redis_cluster import until
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
        "redis+cluster://host:secret",
        "redis+cluster://host/1",
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
    closed_during(sink, sink.open)


def test_attempts_to_connect_wait_for_a_restart(
    start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes up between two attempts is not an error."""
    monkeypatch.setattr(redis_sink, "_CONNECT_WAITS", (0.2,) * 600)
    server = start_redis()
    server.stop()
    restart = threading.Timer(0.3, server.restart)
    restart.start()
    sink = RedisSink("cache", server.uri)
    sink.open()
    restart.join()
    assert sink.send(batch([row(0)]), allow) == 0
    sink.close()


@contextlib.contextmanager
def sentinel(directory: Path, master: RedisServer, dead_after: float = 60) -> Iterator[str]:
    """Run a Sentinel that watches a master as `orders`; gives the start of its URIs.

    It takes a master for dead after so many seconds of silence: more than a slow machine lets it
    wait for a processor, unless another one is to take its place.
    """
    address, password = urlsplit(master.uri), urlsplit(master.uri).password
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\n"
        f"sentinel monitor orders 127.0.0.1 {address.port} 1\n"
        f"sentinel auth-pass orders {password}\n"
        f"sentinel down-after-milliseconds orders {dead_after * 1000:.0f}\n"
        "sentinel failover-timeout orders 3000\n"
    )
    process = ServerProcess(
        "sentinel", [master.program, str(config), "--sentinel"], directory=directory
    )
    try:
        process.wait_until(lambda: master_of(port) is not None, 90)
        yield f"redis+sentinel://:{password}@127.0.0.1:1,127.0.0.1:{port}"
    finally:
        process.stop(signal.SIGTERM, 5)


def master_of(port: int) -> int | None:
    """Return the port of the master that a Sentinel believes to be there, None for none."""
    asked = redis.sentinel.Sentinel([("127.0.0.1", port)])
    with contextlib.closing(asked.sentinels[0]):
        try:
            return int(asked.discover_master("orders")[1])
        except (redis.ConnectionError, redis.TimeoutError):
            return None


def replicas_of(uri: str) -> int:
    """Return how many replicas of the master the last Sentinel of a URI knows."""
    with redis.Redis(port=int(uri.rpartition(":")[2]), socket_timeout=None) as client:
        found = client.sentinel_slaves("orders")
    return sum(one["master-link-status"] == "ok" for one in found)


def test_sentinel_names_the_master(
    start_redis: StartRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Sentinel URI the sink asks each time where the master is.

    The programs are installed as Debian has them: all of them are one, which goes by its name.
    """
    installed = tmp_path / "bin"
    installed.mkdir()
    shutil.copy(start_redis().program, installed / "redis-check-rdb")
    (installed / "redis-server").symlink_to("redis-check-rdb")
    monkeypatch.setenv("PATH", f"{installed}:{os.environ['PATH']}")
    server = start_redis()
    assert server.program == str(installed / "redis-server")
    with sentinel(tmp_path, server) as uri:
        sink = RedisSink("cache", f"{uri}/orders/0")
        sink.open()
        sink.send(numbered(3), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="No master found for 'unknown'"):
            RedisSink("cache", f"{uri}/unknown/0").open()
        with redis.Redis(port=int(uri.rpartition(":")[2])) as client:
            left = [connected["id"] for connected in client.client_list()]
            assert left == [str(client.client_id())], "only this one is connected to the Sentinel"

    assert numbers(server) == [0, 1, 2]


def test_a_failover_by_sentinel(start_redis: StartRedis, tmp_path: Path) -> None:
    """When the master dies the sink fails as one that may be tried again, and goes on at its heir.

    Exactly once, the heir says with the position what it has.
    """
    settings = {"requirepass": "pw", "masterauth": "pw"}
    first, heir = start_redis(settings), start_redis(settings)
    with client_of(heir) as client:
        client.replicaof("127.0.0.1", str(urlsplit(first.uri).port))
        until(lambda: client.info("replication")["master_link_status"] == "up")
    with client_of(first) as old, sentinel(tmp_path, first, dead_after=3) as uri:
        until(lambda: replicas_of(uri) == 1)
        sink = RedisSink("cache", f"{uri}/orders/0", position_key="position")
        sink.open()
        whole = replace(numbered(2_000), origin=ORIGIN)
        sink.send(replace(whole, messages=whole.messages.slice(0, 1_200)), allow)
        assert old.wait(1, 60_000) == 1
        first.stop(immediate=True)
        with pytest.raises(SinkUnavailable):
            sink.send(replace(whole, messages=whole.messages.slice(1_200)), allow)

        def opened() -> bool:
            with contextlib.suppress(SinkUnavailable):
                sink.open()
                return True
            return False

        until(opened)
        assert sink.position() == whole.position_at(1_199)
        sink.send(replace(whole, messages=whole.messages.slice(1_200)), allow)
        sink.close()

    assert numbers(heir) == list(range(2_000))


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


def certificates(directory: Path) -> dict[str, Path]:
    """Make an authority's certificate, and a server's and a client's that it signed."""

    def openssl(command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=directory, check=True, capture_output=True
        )

    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    # From Python 3.13 on clients want to be told what a certificate is for, and whose key signed it.
    usage = "-addext keyUsage=critical,keyCertSign"
    openssl(f"req -x509 {new} {usage} -days 2 -subj /CN=ca -keyout ca.key -out ca.pem")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    for name in ("server", "client"):
        openssl(f"req {new} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        openssl(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
            f"-extfile names -out {name}.pem"
        )
    return {name: directory / name for name in ("ca.pem", "client.pem", "client.key")}


def test_a_file_of_tls_that_is_missing(tmp_path: Path) -> None:
    """It is named, and is no server that might answer later."""
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        sink = RedisSink("cache", f"rediss://127.0.0.1:1?{option}={tmp_path}/none.pem")
        with pytest.raises(
            SettingsError, match=f"sink cache: {option} names the file {tmp_path}/none.pem, which"
        ):
            sink.open()


def test_tls(server: RedisServer, tmp_path: Path) -> None:
    """Over `rediss://` the same bytes arrive; each side is refused without a certificate."""
    files = certificates(tmp_path)
    password, address = urlsplit(server.uri).password, urlsplit(server.uri)
    assert address.port
    with tls_proxy(tmp_path, address.port) as port:
        uri = f"rediss://:{password}@127.0.0.1:{port}/0"
        trusting = f"{uri}?ssl_ca_certs={files['ca.pem']}"
        sink = RedisSink(
            "cache",
            f"{trusting}&ssl_certfile={files['client.pem']}&ssl_keyfile={files['client.key']}",
        )
        sink.open()
        sink.send(numbered(5_000), allow)
        sink.close()
        with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            RedisSink("cache", uri).open()
        with pytest.raises(SinkUnavailable):
            RedisSink("cache", trusting).open()

    assert numbers(server) == list(range(5_000))


@contextlib.contextmanager
def tls_proxy(directory: Path, target: int) -> Iterator[int]:
    """Take TLS connections of clients with a certificate and pass their bytes on to a local port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    context.load_verify_locations(directory / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

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
