"""Dead letters of a NATS sink, from PostgreSQL, seen from the stream."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path

import pytest

from deltaforge_lab.servers.nats import NatsServer
from tests.e2e.conftest import Shop, shop
from tests.fix_nats import Admin
from tests.fix_spark import SparkAddress
from tests.pipeline.ends import PostgresDatabase, ids
from tests.pipeline.live import opened_feed
from tests.pipeline.test_exactly_once import BOTH, PIPELINE, once

__all__ = ["shop"]

pytestmark = [
    pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.nats,
]  # fmt: skip


@BOTH
def test_too_large_for_the_stream(
    *,
    shop: Shop,
    nats_server: NatsServer,
    nats_admin: Admin,
    nats_stream: str,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exactly_once: bool,
) -> None:
    """It goes to the queue and the others pass, in order; once the stream takes it, it arrives whole."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    nats_admin.change(nats_stream, max_msg_size=20_000)
    name = f"feed_{uuid.uuid4().hex[:8]}"
    sink = (
        f'{{type: nats, config: {{id: sink, url: "{nats_server.url}", stream: {nats_stream}, '
        f"subject: {nats_stream}.customers, exactly_once: {str(exactly_once).lower()}}}}}"
    )
    text = PIPELINE.format(
        name=name, source=PostgresDatabase(shop).source(name), sink=sink, more_sinks=""
    ).replace("  engine:\n", "  journal: {enabled: true}\n  engine:\n")
    large = secrets.token_urlsafe(30_000)

    def arrived() -> list[int]:
        found = ids(nats_admin.values(nats_stream))
        assert len(found) == len(once(found)) or not exactly_once
        return once(found)

    with opened_feed(shop, tmp_path / f"{name}.yaml", text, spark_server) as feed:
        shop.execute(f"INSERT INTO customers VALUES (1, 'a'), (2, '{large}'), (3, 'b')")
        shop.execute("INSERT INTO customers VALUES (4, 'c')")
        assert feed.catch_up().sink_errors == {}
        assert arrived() == [1, 3, 4]
        (letter,) = feed.store.dead_letters.read(name)
        assert (letter.state, letter.error_kind, letter.attempts) == ("dead", "too_large", 1)

        nats_admin.change(nats_stream, max_msg_size=-1)
        assert feed.store.dead_letters.redrive(name) == 1
        assert feed.catch_up().sink_errors == {}
        assert arrived() == [1, 3, 4, 2]
        assert feed.store.dead_letters.read(name) == []
        shop.execute("INSERT INTO customers VALUES (5, 'd')")
        assert feed.catch_up().sink_errors == {}
        assert arrived() == [1, 3, 4, 2, 5]
        assert feed.store.checkpoints.read(name)["sink"].notice is None
