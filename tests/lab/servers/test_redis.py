"""Our own Redis server."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.installation import process
from deltaforge_lab.servers import base
from deltaforge_lab.servers.redis import RedisServer
from tests.fix_redis import StartRedis
from tests.installation.test_process import gone

pytestmark = pytest.mark.redis


def test_the_packaged_server_asks_for_its_password() -> None:
    """A client without the password is refused."""
    with RedisServer.start(origins=["package"]) as server:
        port = server.uri.rpartition(":")[2].split("/")[0]
        with (
            redis.Redis(port=int(port), socket_timeout=None) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()


def test_data_outlives_a_kill(start_redis: StartRedis) -> None:
    """After a kill and a restart the same URI has what was acknowledged."""
    server = start_redis()
    with redis.Redis.from_url(server.uri, socket_timeout=None) as client:
        client.xadd("stream", {"a": "1"})
        server.stop(immediate=True)
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()

        assert client.xlen("stream") == 1


def test_a_paused_server_hangs_and_goes_on(start_redis: StartRedis) -> None:
    """Pausing looks like a hung server to clients: no answer and no closed connection."""
    server = start_redis()
    with redis.Redis.from_url(server.uri, socket_timeout=5, retry=None) as client:
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
    with redis.Redis.from_url(server.uri, socket_timeout=None) as client:
        assert client.ping()


def test_a_paused_server_can_be_stopped(start_redis: StartRedis) -> None:
    """Closing never waits for a frozen process."""
    server = start_redis()
    pid = server.pid
    server.pause()
    server.close()

    assert gone(pid)


def test_settings_reach_the_server(start_redis: StartRedis) -> None:
    """Tests can make a server that runs out of memory."""
    server = start_redis({"maxmemory": "100mb"})
    with redis.Redis.from_url(server.uri, decode_responses=True, socket_timeout=None) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(100 << 20)}


def test_an_attached_server_is_only_used(redis_server: RedisServer) -> None:
    """Somebody else's server is neither paused nor stopped."""
    attached = RedisServer.attach(redis_server.uri)
    with pytest.raises(NotAllowed):
        attached.pause()
    attached.close()

    assert attached.version == redis_server.version


def test_a_missing_server_is_one_line_that_says_how_to_get_it() -> None:
    """The error is for the reader, and needs no second look."""
    with pytest.raises(SettingsError) as caught:
        RedisServer.start(origins=[])

    assert "\n" not in str(caught.value)
    assert "pip install 'deltaforge-dagster[lab]'" in str(caught.value)
    assert "apt-get install redis-server" in str(caught.value)


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_stops_in_order_only_where_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """What is removed with the server need not be written first."""
    removed: list[Path] = []
    monkeypatch.setattr(base, "remove_directory", removed.append)
    RedisServer.start(tmp_path / "data" if kept else None).close()

    (temporary,) = removed
    assert ("ready to exit" in (temporary / "server.log").read_text()) == kept
    process.remove_directory(temporary)
