"""Tests of `status` and `ranges` with a real state store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.state.records import EarlyConfirmation, SourceLog
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.control.test_catalog import FILE
from tests.state.make import NAME, capture, deliver, expire, held


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The state store of the installation."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


def lines(*arguments: str, code: int = 0) -> list[list[str]]:
    """Run a command and return its lines split into columns; check that no line ends in spaces."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert not [line for line in result.output.splitlines() if line.endswith(" ")]
    split = (line.replace("  ", "\t").split("\t") for line in result.output.splitlines())
    return [[cell.strip() for cell in line if cell.strip()] for line in split]


def test_status_of_nothing(store: StateStore) -> None:
    """With an empty store the command reports that nothing has run."""
    assert lines("status") == [["No pipeline has run yet."]]


def test_status_of_a_live_pipeline(store: StateStore) -> None:
    """The output has the facts of the pipeline, and a line per sink with its backlog."""
    lease = held(store, "cache", "file")
    capture(store, lease, 1, 2)
    capture(store, lease, 3, close=False)
    deliver(store, lease, "cache", 3)
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("file", 2, 1, False, None)
        writer.checkpoints.failed("file", "sink file: disk [full]", store.now() + 90_000 + 1_800)

    shown = lines("status", code=1)

    assert shown[0][:3] == ["orders", "running", "with problems"]
    assert shown[1] == ["error: sink file: disk [full] (for 0 s); next attempt in 1 d 1 h"]
    assert shown[2] == ["captured", "lsn 0/00000300 tx_id 3, segment 3"]
    assert shown[3] == ["confirmed", "-"]
    assert shown[4] == ["journal", "300 B"]
    assert shown[5][0] == "range"
    assert shown[5][1].startswith("2 open for ")
    assert shown[5][1].endswith(", 3 rows")
    assert shown[6][1].startswith("run run-1 (epoch 1), ")
    assert shown[7] == ["seen", "a run is at work"]
    assert shown[8] == ["sink", "segment", "behind", "lag", "moved", "failures", "next attempt"]
    assert shown[9][:4] == ["cache", "3", "no segment", "-"], "nobody has looked at the source"
    assert shown[10][:3] == ["file", "2 row 1", "2 segments, 4 rows"]
    assert " d" in shown[10][3], "its changes are of 1970"
    assert shown[10][5] == "1"
    assert shown[10][6] == "in 1 d 1 h"


def test_one_of_something(store: StateStore) -> None:
    """Counts of one use the singular."""
    lease = held(store, "cache")
    capture(store, lease, 1, 2)
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("cache", 2, 1, False, None)

    assert lines("status")[8][:3] == ["cache", "2 row 1", "1 segment, 1 row"]


def test_a_file_that_is_broken_or_has_not_begun(
    store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status also reflects the pipeline file: a broken one is shown at once with file, line and cause."""
    folder = tmp_path / "pipelines"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(folder))
    (folder / "filed.yaml").write_text(FILE)
    shown = lines("status")
    assert shown[0] == ["filed", "running", "with problems"]
    assert shown[1][0].startswith("warning: sensor: nothing has worked on it yet")

    register(store, load_pipeline(folder / "filed.yaml"))
    (folder / "filed.yaml").write_text("metadata: {name: filed, tenant: acme\nspec: [")
    shown = lines("status", code=1)
    assert shown[0] == ["filed", "failed"]
    assert shown[1][0].startswith(f"error: file: {folder}/filed.yaml:2: ")
    result = CliRunner().invoke(app, ["status", "filed", "--json"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["pipelines"]
    assert (found["status"], found["well"]) == ("failed", False)
    assert found["problems"][0]["subject"] == "file"


def test_status_after_a_crash(store: StateStore) -> None:
    """An expired lease names the run that lost it; a closed range has its close reason."""
    lease = held(store, "cache")
    capture(store, lease, 1)
    expire(store)
    store.pipelines.set_desired_state(NAME, "paused")

    shown = lines("status")

    assert shown[0][:2] == ["orders", "paused"]
    assert shown[4][1].startswith("1 closed ")
    assert shown[4][1].endswith("ago (max_events), 3 rows")
    assert shown[5][1].startswith("free; run run-1 lost it ")


def test_status_of_a_new_pipeline(store: StateStore) -> None:
    """A pipeline that has only a start position shows it."""
    store.pipelines.register("a-new-one", "spec", ["cache"])

    shown = lines("status")

    assert shown[:2] == [["a-new-one", "running"], ["captured", "-, segment 0"]]
    assert shown[4:6] == [["range", "none yet"], ["lease", "free"]]


def test_ranges(store: StateStore) -> None:
    """Ranges are listed newest first, with content, sinks and publication."""
    lease = held(store, "cache")
    capture(store, lease, 1, 2)
    capture(store, lease, 3)
    capture(store, lease, 4, close=False)
    deliver(store, lease, "cache", 3)
    store.pipelines.register(NAME, "spec-2", ["cache", "late"])
    for number, asset in ((1, "changes"), (1, "cache"), (1, "late"), (2, "changes")):
        store.ranges.mark_published(NAME, number, asset)

    shown = lines("ranges", NAME)

    assert shown[0][:6] == ["range", "state", "rows", "bytes", "opened", "seconds"]
    assert shown[0][6:] == ["cache", "late", "published"]
    assert [line[0] for line in shown[1:]] == ["3", "2", "1"]
    assert shown[1][1:4] == ["open", "3", "100 B"]
    assert shown[1][6:] == ["no", "no", "no"]
    assert shown[2][6:] == ["yes", "-", "changes"]
    assert shown[3][1:4] == ["closed", "6", "200 B"]
    assert shown[3][6:] == ["yes", "-", "all"]
    assert [line[0] for line in lines("ranges", NAME, "--limit", "1")[1:]] == ["3"]


def test_no_ranges(store: StateStore) -> None:
    """A pipeline without ranges is reported as such; an unknown pipeline is an error that lists the others."""
    store.pipelines.register(NAME, "spec", ["cache"])

    assert lines("ranges", NAME) == [["No range yet."]]
    result = CliRunner().invoke(app, ["ranges", "order"])
    assert result.exit_code == 2
    assert result.stderr == "error: no pipeline 'order' in the state store (there is: orders)\n"


def test_memory_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state store in memory is an error, since it belongs to another process."""
    monkeypatch.setenv("DELTAFORGE_STATE_URL", "memory")

    result = CliRunner().invoke(app, ["status"])

    assert result.exit_code == 2
    assert "memory" in result.stderr


def test_what_is_not_read_yet(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink is not behind only if somebody has just found that the source has nothing left; the line says how much it has."""
    deliver(store, held(store, "cache"), "cache", 0)
    now = store.now()
    monkeypatch.setattr(type(store.database), "now", lambda _self: now)

    def shown(log: SourceLog) -> tuple[str, str]:
        store.pipelines.note_source_log(NAME, log)
        found = {line[0]: line for line in lines("status")}
        return found["log ahead"][1], found["cache"][2]

    assert shown(SourceLog(now, 0)) == ("0 B (seen 0 s ago)", "no")
    assert shown(SourceLog(now, 2048, unread=False)) == (
        "2.0 KiB, without changes to capture (seen 0 s ago)",
        "no",
    )
    assert shown(SourceLog(now, 2048))[1] == "no segment"
    assert shown(SourceLog(now, 5 << 20, now - 180, unread=True)) == (
        "5.0 MiB, with changes to capture, growing for 3 min (seen 0 s ago)",
        "no segment",
    )
    assert shown(SourceLog(now, 2048, unread_since=now - 60))[0] == (
        "2.0 KiB, for 1 min (seen 0 s ago)"
    )
    assert shown(SourceLog(now, 0, receiving_rows=1200, receiving_since=now - 7)) == (
        "0 B, a transaction is being received: 1,200 rows in 7 s (seen 0 s ago)",
        "no segment",
    )
    assert shown(SourceLog(now - 60, 0)) == ("0 B (seen 1 min ago)", "no segment")
    (found,) = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["pipelines"]
    assert found["source_log"]["bytes"] == 0
    assert found["confirmed_early"] is None


def test_what_the_server_keeps_of_its_log(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much, of how much, since when, and for how long that suffices; a warning when it soon does not."""
    monkeypatch.setenv("COLUMNS", "400")
    lease = held(store, "cache")
    deliver(store, lease, "cache", 0)
    now, mib = store.now(), 1 << 20
    monkeypatch.setattr(type(store.database), "now", lambda _self: now)

    def shown(log: SourceLog) -> tuple[str, list[str]]:
        store.pipelines.note_source_log(NAME, log)
        (found,) = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["pipelines"]
        texts = [one["text"] for one in found["problems"] if one["subject"] == "source log"]
        kept = {line[0]: line for line in lines("status")}.get("log kept")
        return kept[1] if kept else "", texts

    assert shown(SourceLog(now, 0)) == ("", [])
    assert shown(SourceLog(now, 0, retained=mib)) == (
        "1.0 MiB for this pipeline, of any amount",
        [],
    )
    slot = SourceLog(
        now,
        mib,
        retained=100 * mib,
        unconfirmed=90 * mib,
        unconfirmed_since=now - 600,
        limit=256 * mib,
        limited_by="max_slot_wal_keep_size",
        growth=float(mib // 100),
        seconds_left=15_600.0,
    )
    calm = (
        "100.0 MiB for this pipeline, of 256.0 MiB (max_slot_wal_keep_size), 90.0 MiB not confirmed, for 10 min, growing "
        "by 10.2 KiB/s, lost in 4 h 20 min"
    )
    assert shown(slot) == (calm, [])
    begins = "the server retains {} of log for it, most of it captured, but not delivered yet, and retains at most 256.0 MiB "
    begins += "(max_slot_wal_keep_size)"
    soon = shown(dataclasses.replace(slot, seconds_left=3599.0))[1]
    assert soon == [begins.format("100.0 MiB") + "; at this rate changes are lost in 59 min 59 s"]
    half = dataclasses.replace(slot, retained=128 * mib, seconds_left=None)
    assert shown(half)[1] == [begins.format("128.0 MiB")]
    (unread,) = shown(dataclasses.replace(half, bytes=80 * mib))[1]
    assert "most of it not captured yet" in unread
    aged = SourceLog(
        now, 9, room=3 * mib, kept_seconds=7200.0, limited_by="binlog_expire_logs_seconds"
    )
    shows = "3.0 MiB before the captured position; kept for 2 h (binlog_expire_logs_seconds)"
    assert shown(aged) == (shows, [])
    assert shown(dataclasses.replace(aged, seconds_left=60.0))[1] == [
        "the server removes log by age, captured or not (binlog_expire_logs_seconds); at this rate changes are lost in 1 min"
    ]
    with store.fenced(lease) as writer:
        writer.pipeline.set_early_confirmation(EarlyConfirmation(now - 120, "so it is"))
    assert shown(SourceLog(now, 0))[1] == []
    (found,) = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["pipelines"]
    (early,) = [one["text"] for one in found["problems"] if one["subject"] == "confirm"]
    assert "confirmed up to what the journal has, because so it is" in early
    confirmed = {line[0]: line for line in lines("status")}["confirmed"][1]
    assert confirmed.endswith("up to what the journal has for 2 min: so it is")
