"""Tests of `sink pause`, `sink resume` and `sink attach` with a real state store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from tests.cli.operate.test_status import lines
from tests.state.make import NAME, capture, deliver, held


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store in which a live run has detached `file`, which has one of two segments."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(opened, "cache", "file")
    for number in (1, 2):
        capture(opened, lease, number)
        deliver(opened, lease, "cache", number)
    deliver(opened, lease, "file", 1)
    with opened.fenced(lease) as writer:
        writer.checkpoints.detach("file", "detached: the journal is full")
        writer.pipeline.set_capture_pause("the journal is full")
    yield opened
    opened.close()


def test_status_shows_what_is_detached_and_paused(store: StateStore) -> None:
    """`status` shows a sink detached by a full journal, since when, and the command to attach it."""
    shown = lines("status")
    problems = [line[0].partition(" (for ") for line in shown]

    assert ["paused", "the journal is full"] in shown
    assert ["file", "1", "detached; deltaforge sink attach orders file"] in [
        line[:3] for line in shown
    ]
    for problem in (
        "warning: sink file: detached: the journal is full",
        "warning: journal: capture is paused: the journal is full",
    ):
        assert any((text, bool(since)) == (problem, True) for text, since, _ in problems)
    assert ["run: deltaforge sink attach orders file"] in shown


@pytest.mark.parametrize(("options", "segment"), [((), 2), (("--tail",), 3)])
def test_attach(store: StateStore, options: tuple[str, ...], segment: int) -> None:
    """A sink is attached at its checkpoint or at the tail, and the output names its next segment."""
    shown = lines("sink", "attach", NAME, "file", *options)

    assert shown == [[f"file is attached and continues with segment {segment}."]]
    assert store.checkpoints.read(NAME)["file"].attached


def test_pause_and_resume(store: StateStore) -> None:
    """Both commands report what they do, and `status` shows the command to resume."""
    (said,) = lines("sink", "pause", NAME, "cache")
    assert said[0].startswith("cache is paused; ")
    assert said[0].endswith("Everything from segment 3 on is kept for it.")
    shown = lines("status")
    assert ["cache", "2", "no segment; paused: deltaforge sink resume orders cache"] in [
        line[:3] for line in shown
    ]

    assert lines("sink", "resume", NAME, "cache") == [["cache continues with segment 3."]]
    assert store.checkpoints.read(NAME)["cache"].state == "attached"


def test_status_shows_where_a_sink_began(store: StateStore) -> None:
    """`status` shows that a sink added later does not have everything."""
    store.pipelines.register(NAME, "spec-2", ["cache", "file", "late"], {"late": "tail"})

    expected = "sink late: added; begins with segment 3, with what was captured after it was added"
    assert [f"{expected} (start: tail)"] in lines("status")


def test_refusals(store: StateStore) -> None:
    """A sink that is removed, attached or unknown is one error that says what to do."""
    for number, asset in store.ranges.unpublished(NAME):
        store.ranges.mark_published(NAME, number, asset)
    store.segments.expire(NAME, [1, 2])
    for arguments, expected in (
        ((NAME, "file"), "--tail lets it go on"),
        ((NAME, "cache"), "sink 'cache' is attached"),
        ((NAME, "other"), "has no sink 'other'"),
        (("others", "file"), "no pipeline 'others'"),
    ):
        result = CliRunner().invoke(app, ["sink", "attach", *arguments])
        assert result.exit_code == 2
        assert expected in result.stderr
