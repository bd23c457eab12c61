"""Puts on the condition that there is no object of the name, on a server that knows it."""

from __future__ import annotations

import shutil
import signal
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from deltaforge_dagster.installation.process import ServerProcess, free_port
from deltaforge_dagster.sinks.objects import stores
from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.objects.stores import RemoteStore

pytestmark = [pytest.mark.s3, pytest.mark.soak("faults")]

PATH = "table=orders/a.parquet"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RemoteStore]:
    """A bucket on a server of moto."""
    scripts = sysconfig.get_path("scripts")
    program = shutil.which("moto_server") or shutil.which("moto_server", path=scripts)
    if program is None:
        pytest.fail("moto_server is missing: pip install 'moto[s3]' flask-cors", pytrace=False)
    port = free_port()
    server = ServerProcess(
        "moto", [program, "-H", "127.0.0.1", "-p", str(port)], directory=tmp_path
    )

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 2).close()
        except OSError:
            return False
        return True

    try:
        server.wait_until(answers, 60)
        config = S3SinkConfig(
            id="files",
            bucket="lake",
            region="eu-west-1",
            endpoint=f"http://127.0.0.1:{port}",
            access_key_id=SecretStr("key"),
            secret_access_key=SecretStr("secret"),
        )
        store = RemoteStore(config, seconds=30)
        store._client().mkdir("lake")
        yield store
    finally:
        server.stop(signal.SIGTERM, 10)


@pytest.mark.parametrize("size", [7, 12 << 20], ids=["one part", "several parts"])
def test_the_first_of_a_name_stays(
    store: RemoteStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second, which a dead run has begun before, is dropped, and counts as put."""
    monkeypatch.setattr(stores, "_PART_BYTES", 5 << 20)
    with store.create(PATH) as late, store.create(PATH) as first:
        late.write(b"late")
        late.write(b"l" * size)
        first.write(b"f" * size)
        first.complete()
        late.complete()
    assert store._client().cat(f"lake/{PATH}") == b"f" * size
    assert store._conditional
