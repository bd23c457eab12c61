"""Tests of what Dagster shows as stale: ranges that were made with another pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from deltaforge_dagster.assets.names import asset_key, partition_key
from deltaforge_dagster.assets.pipeline import build_pipeline_asset
from deltaforge_dagster.assets.publish import materialization, publish
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.closed_ranges import publication_of
from deltaforge_dagster.pipeline.control.specs import noted_spec
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.processors.code import chain_hash
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.state.records import Processed
from deltaforge_dagster.state.store import StateStore
from tests.config.conftest import Write, write
from tests.state.make import NAME, deliver, new_segment, position

__all__ = ["write"]

ASSETS = ("changes", "cache", "lines")


class Installation:
    """A pipeline in a store and a Dagster instance; each range is one segment."""

    def __init__(self, store: StateStore, instance: dg.DagsterInstance) -> None:
        self.store = store
        self.instance = instance

    def run(
        self, loaded: LoadedPipeline, number: int, *sinks: str, chain: str | None = None
    ) -> None:
        """Capture range `number` with a file, deliver it to these sinks, and publish.

        `chain` is the hash of the chain that processed it.
        """
        register(self.store, loaded)
        self.store.pipelines.set_start(NAME, position(0))
        lease = self.store.leases.acquire(NAME, f"run-{number}", 60)
        assert lease is not None
        with self.store.fenced(lease) as writer:
            opened = writer.ranges.open(position(number - 1), loaded.hash, number)
            writer.segments.add(new_segment(number), opened)
            if chain is not None:
                writer.segments.add_processed(
                    [Processed(number, chain, None, None, None, 0, 0, {})]
                )
            writer.ranges.close(opened, "max_events", f"hash-{number}")
        for sink in sinks:
            deliver(self.store, lease, sink, number)
        with self.store.fenced(lease) as writer:
            writer.lease.release()
        publish(
            self.instance,
            self.store,
            NAME,
            self.instance.report_runless_asset_event,
            Journal("memory://links"),
        )

    def stale(self, loaded: LoadedPipeline, number: int) -> dict[str, bool]:
        """Return for each asset whether its range is stale by the definitions of a file."""
        definitions = dg.Definitions(
            assets=[build_pipeline_asset(loaded, Platform(Settings.from_env()))]
        )
        graph = definitions.resolve_asset_graph()
        resolver = CachingStaleStatusResolver(
            self.instance, graph, LoadingContextForTest(self.instance)
        )
        status = {
            asset: resolver.get_status(asset_key(NAME, asset), partition_key(number))
            for asset in ASSETS
        }
        return {
            asset: one == StaleStatus.STALE
            for asset, one in status.items()
            if one != StaleStatus.MISSING
        }


@pytest.fixture
def installation(sqlite_store: StateStore, instance: dg.DagsterInstance) -> Installation:
    """Return an installation without ranges."""
    return Installation(sqlite_store, instance)


CHANGES: dict[tuple[str, ...], list[dict[str, Any]]] = {
    (): [
        {},
        {"spec.sinks.0.config.send_timeout_secs": 1, "metadata.labels": {"a": "b"}},
        {"spec.source.config.dsn": "postgres://u:other@localhost/app"},
        {"spec.engine.range.max_seconds": 5},
    ],
    ("cache",): [{"spec.sinks.0.config.stream": "other"}],
    ("lines",): [{"spec.sinks.1.config.envelope": "debezium"}],
    ASSETS: [
        {"spec.source.config.dsn": "postgres://u:geheim@elsewhere/app"},
        {"spec.source.config.tables": ["public.orders", "public.items"]},
        {"spec.processors": [{"type": "flatten"}]},
        {"spec.engine.values.toast": "omit"},
        {"spec.engine.columns": {"mask": {"orders.email": "-"}}},
    ],
}
"""Changes of the file, with the assets whose ranges each one makes stale."""


def changed(*stale: str) -> dict[str, bool]:
    """Return what `stale` returns if exactly these assets are stale."""
    return {asset: asset in stale for asset in ASSETS}


@pytest.mark.parametrize("stale", [(), ("cache",), ("lines",), ASSETS], ids=str)
def test_what_makes_ranges_stale(
    installation: Installation, write: Write, stale: tuple[str, ...]
) -> None:
    """A change of the source, of values or of processors makes all assets stale, one of a sink only that sink."""
    installation.run(load_pipeline(write()), 1, "cache", "lines")

    for changes in CHANGES[stale]:
        assert installation.stale(load_pipeline(write(changes)), 1) == changed(*stale), changes


def test_only_ranges_of_the_old_file_are_stale(installation: Installation, write: Write) -> None:
    """Each range keeps the version that captured it; in a sink also the version that delivered it."""
    before = load_pipeline(write())
    after = load_pipeline(write({"spec.sinks.0.config.stream": "other"}))
    installation.run(before, 1, "lines")
    installation.run(after, 2, "cache", "lines")

    assert installation.stale(after, 1) == changed()
    assert installation.stale(after, 2) == changed()
    assert installation.stale(before, 1) == changed("cache")


def test_a_replay_refreshes_a_range(installation: Installation, write: Write) -> None:
    """A replay makes a range fresh if the current processors made its messages."""
    installation.run(load_pipeline(write()), 1, "cache", "lines")
    after = load_pipeline(
        write({"spec.sinks.0.config.stream": "other", "spec.processors": [{"type": "flatten"}]})
    )
    register(installation.store, after)

    def again(asset: str, **how: bool) -> None:
        publication = publication_of(installation.store, NAME, 1, asset, **how)
        event = materialization(NAME, publication, Journal("memory://links"))
        installation.instance.report_runless_asset_event(event)

    again("changes")
    assert installation.stale(after, 1) == changed(*ASSETS)
    again("cache")  # as it was processed then
    assert installation.stale(after, 1) == changed(*ASSETS)
    again("cache", reprocessed=True)
    assert installation.stale(after, 1) == changed("changes", "lines")


def test_the_source_of_a_function_counts(
    installation: Installation, write: Write, tmp_path: Path
) -> None:
    """A changed function in a module makes ranges stale although the pipeline file is the same."""
    module = tmp_path / "cleaning.py"
    module.write_text("def clean(table): return table")
    python = {"type": "python", "function": "cleaning:clean", "path": str(tmp_path)}
    path = write({"spec.processors": [python]})
    installation.run(load_pipeline(path), 1, "cache", "lines")
    assert installation.stale(load_pipeline(path), 1) == changed()

    module.write_text("def clean(table): return table.slice(1)")

    assert installation.stale(load_pipeline(path), 1) == changed(*ASSETS)
    installation.run(load_pipeline(path), 2, "cache", "lines")
    assert installation.stale(load_pipeline(path), 2) == changed()


def test_the_chain_that_processed_a_range_counts(installation: Installation, write: Write) -> None:
    """A range captured before a change of processors but processed after it is fresh in sinks."""
    before = load_pipeline(write())
    after = load_pipeline(write({"spec.processors": [{"type": "flatten"}]}))
    chain = chain_hash(after.spec.spec.processors, {})
    installation.run(before, 1, "cache", "lines", chain=chain)
    installation.run(before, 2, "cache", "lines", chain="")

    assert installation.stale(after, 1) == changed("changes")
    assert installation.stale(after, 2) == changed(*ASSETS)
    assert installation.stale(before, 2) == changed()


def test_specs_that_were_at_work_are_kept(sqlite_store: StateStore, write: Write) -> None:
    """The store keeps the effective file of each range, without secrets and scripts."""
    script = {"type": "javascript", "id": "s", "inline": "// geheim\nfunction processBatch(e) {}"}
    loaded = load_pipeline(write({"spec.processors": [script]}))
    register(sqlite_store, loaded)

    noted = noted_spec(sqlite_store, NAME, loaded.hash)

    assert noted is not None
    assert noted.content["spec"]["engine"]["range"]["max_seconds"] == 60
    assert noted.content["spec"]["processors"][0]["inline"].startswith("sha256:")
    assert "geheim" not in str(noted)
    assert noted_spec(sqlite_store, NAME, "of an older version") is None
