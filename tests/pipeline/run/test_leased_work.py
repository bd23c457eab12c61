"""A state store that is gone: no run goes on without it, and none starts over beside its journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaforge_dagster.errors import NotAllowed, StoreLost
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.run.leased_work import refuse_lost_store
from deltaforge_dagster.state.copies import back_up, restore
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Background, Feed, opened_feed

__all__ = ["shop"]

OTHER = "0123456789abcdef" * 2
SEGMENT = f"0000000001-000001-{OTHER}.parquet"


def keys(feed: Feed) -> list[int]:
    """Return the ids of the customers that have arrived."""
    return [json.loads(entry["df-event"])["after"]["id"] for entry in feed.delivered("customers")]


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
def test_no_run_goes_on_without_its_store(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path
) -> None:
    """A run whose store is removed ends at once; the next refuses a new one; with a copy nothing is missing."""
    text = shop.pipeline("lost", tables="[public.customers]", run="{idle_seconds: 600}")
    file, copy = tmp_path / "lost.yaml", tmp_path / "copy.db"
    with opened_feed(shop, file, text, spark_server) as feed:
        shop.execute("INSERT INTO customers SELECT n FROM generate_series(1, 5) n")
        feed.catch_up()
        back_up(feed.store, copy)
        run = Background(feed.live_run())
        for one in (tmp_path / "home").glob("state.db*"):
            one.unlink()
        with pytest.raises(StoreLost, match=r"state\.db: the file was removed while"):
            run.outcome()
    shop.execute("INSERT INTO customers SELECT n FROM generate_series(6, 9) n")

    with opened_feed(shop, file, text, spark_server) as feed:
        refused = feed.catch_up().capture_error
        assert refused is not None
        assert "the journal has segments that this state store knows nothing of" in refused
        assert "deltaforge state restore FILE --force" in refused
        restore(copy, feed.store, force=True)
        assert feed.catch_up().capture_error is None
        arrived = keys(feed)

    assert arrived == list(range(1, 10))


def test_only_segments_of_another_store_are_refused(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """Neither its own, another pipeline's, what lies beside segments, nor anything by a store in memory."""
    memory = StateStore.open("memory")
    journal = Journal(tmp_path.joinpath("journal").as_uri())

    def leave(folder: str, name: str = SEGMENT) -> None:
        target = tmp_path / "journal" / folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()

    for store in (sqlite_store, memory):
        own = store.pipelines.register("p", "hash", ["s"]).uid
        leave(f"p/{own}")
    leave(f"q/{OTHER}")
    leave("p/prepared", "messages.arrow")
    leave(f"p/{OTHER}", "unfinished")
    leave("p", "note")
    refuse_lost_store(memory, journal, "p")
    for folder in (tmp_path / "journal" / "p").iterdir():
        if folder.name == own:  # of the other store
            folder.joinpath(SEGMENT).unlink()
    refuse_lost_store(sqlite_store, journal, "p")

    leave(f"p/{OTHER}")
    refuse_lost_store(memory, journal, "p")
    with pytest.raises(NotAllowed, match=f"file://.*/journal/p/{OTHER}\\)"):
        refuse_lost_store(sqlite_store, journal, "p")
    memory.close()
