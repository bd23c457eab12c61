"""`checkpoint show` and `checkpoint reset` over a real state store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, held


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The installation's own store."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


@pytest.fixture
def lease(store: StateStore) -> Lease:
    """The lease over three ranges of two segments; `cache` has all of the second one."""
    lease = held(store, "cache", "file")
    for first in (1, 3, 5):
        capture(store, lease, first, first + 1)
    deliver(store, lease, "cache", 4)
    return lease


@pytest.fixture
def released(store: StateStore, lease: Lease) -> None:
    """The same, and nobody holds the lease."""
    with store.fenced(lease) as writer:
        writer.release()


def reset(to: str, sink: str = "cache") -> str:
    """Reset a checkpoint and return what was printed."""
    arguments = ["checkpoint", "reset", NAME, "--sink", sink, "--to", to]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(to: str, sink: str = "cache", pipeline: str = NAME) -> str:
    """Try to reset a checkpoint and return the error."""
    arguments = ["checkpoint", "reset", pipeline, "--sink", sink, "--to", to]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_show(store: StateStore, lease: Lease) -> None:
    """Each sink's checkpoint, with the row inside a segment that is not complete."""
    with store.fenced(lease) as writer:
        writer.advance("file", 2, 1, False, None)

    result = CliRunner().invoke(app, ["checkpoint", "show", NAME])

    assert result.exit_code == 0
    heading, cache, file = (line.split("  ") for line in result.output.splitlines())
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (heading, cache, file)]
    assert cells[0] == ["sink", "segment", "row", "source position", "last moved"]
    assert cells[1][:4] == ["cache", "4", "all", "lsn 0/00000400 tx_id 4"]
    assert cells[2][:4] == ["file", "2", "1", "lsn 0/00000000 tx_id 0"]


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(
    ("to", "segment", "expected"),
    [
        ("oldest", 0, "goes on with segment 1: delivers 4 segments again, up to 4."),
        ("range:2", 2, "goes on with segment 3: delivers 2 segments again, up to 4."),
        ("range:3", 4, "goes on with segment 5: as before."),
        ("tail", 6, "goes on with segment 7: skips 2 segments, from 5 on."),
    ],
)
def test_reset(store: StateStore, to: str, segment: int, expected: str) -> None:
    """Each way of saying where to go on, and what that means is printed."""
    assert reset(to) == f"cache {expected}\n"
    checkpoint = store.checkpoints(NAME)["cache"]
    assert (checkpoint.segment, checkpoint.complete) == (segment, True)


@pytest.mark.usefixtures("released")
def test_reset_of_a_failed_sink(store: StateStore) -> None:
    """A reset forgets failures, and may begin a segment again that was in the middle."""
    lease = store.acquire_lease(NAME, "run-2", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.advance("cache", 5, 1, False, None)
        writer.sink_failed("cache", "down", 0.0)
        writer.release()

    assert reset("range:3") == "cache goes on with segment 5: begins that segment again.\n"
    checkpoint = store.checkpoints(NAME)["cache"]
    assert (checkpoint.failures, checkpoint.last_error) == (0, None)


@pytest.mark.usefixtures("lease")
def test_a_held_pipeline_is_refused() -> None:
    """While a run holds the lease nothing is reset."""
    assert "held by run run-1" in refused("oldest")


@pytest.mark.usefixtures("released")
def test_wrong_words_are_refused() -> None:
    """Unknown pipelines, sinks, ranges and words are named, with what there is."""
    assert refused("oldest", pipeline="other").endswith("(there is: orders)\n")
    assert refused("oldest", sink="kafka").endswith("(there is: cache, file)\n")
    assert refused("range:9") == "error: pipeline 'orders' has no range 9\n"
    for wrong in ("newest", "range:", "range:x", "range", "7"):
        assert refused(wrong) == f"error: --to {wrong}: write oldest, tail or range:N\n"
