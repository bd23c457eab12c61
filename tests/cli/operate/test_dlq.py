"""Tests of `deltaforge dlq`, and of dead letters in `status`, with a real state store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, dead_letter, held

DIGITS = "12345678901234567890123456789012345678901"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store with three dead letters of one sink, one of which waits, and one dead letter of another sink."""
    monkeypatch.setenv("COLUMNS", "250")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(opened, "cache", "bus")
    letters = [
        dead_letter(1, source_cursor='{"lsn":"0/1"}', event=f'{{"after":{{"n":{DIGITS}}}}}'),
        dead_letter(2, error_kind="too_large", error_message="9 bytes", payload_truncated=True),
        dead_letter(3, state="waiting", error_kind="waiting"),
    ]
    with opened.fenced(lease) as writer:
        writer.dead_letters.add("cache", letters, max_entries=9, overflow="block")
        writer.dead_letters.add("bus", [dead_letter(1)], max_entries=9, overflow="block")
    yield opened
    opened.close()


def said(*command: str) -> str:
    """Return the output of a command."""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*command: str) -> str:
    """Return the error message of a refused command."""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_list(store: StateStore) -> None:
    """`list` shows the change, the sink and the cause, without events."""
    shown = said("dlq", "list", NAME).splitlines()
    assert [line.split()[:6] for line in shown[1:]] == [
        ["1", "cache", "public.orders", "dead", "routing", "1"],
        ["2", "cache", "public.orders", "dead", "too_large", "1"],
        ["3", "cache", "public.orders", "waiting", "waiting", "0"],
        ["4", "bus", "public.orders", "dead", "routing", "1"],
    ]
    assert "nowhere to go" in shown[1]
    assert DIGITS not in "".join(shown)
    assert len(said("dlq", "list", NAME, "--sink", "bus").splitlines()) == 3
    assert "2 of 4 entries" in said("dlq", "list", NAME, "--limit", "2")
    nothing = said("dlq", "list", NAME, "--kind", "serialization")
    assert nothing == "There are no such dead letters.\n"
    assert "no pipeline 'other'" in refused("dlq", "list", "other")


def test_a_sink_that_writes_tables_has_none(store: StateStore) -> None:
    """The commands say where to look instead."""
    row = store.leases.get(NAME)
    assert row is not None
    with store.fenced(Lease(NAME, "run-1", row.epoch, row.expires_at)) as writer:
        writer.table_commits.restart("lake", 0)

    for command in (["list"], ["redrive"], ["purge"]):
        assert "writes tables and has no dead letters" in refused(
            "dlq", *command, NAME, "--sink", "lake"
        )


def test_for_programs(store: StateStore) -> None:
    """The JSON output has the fields of DeltaForge's entries, and numbers keep their digits."""
    found = json.loads(said("dlq", "list", NAME, "--json"), parse_int=str)
    assert (found["pipeline"], found["count"], len(found["entries"])) == (NAME, "4", 4)
    first = found["entries"][0]
    assert first["event"] == {"after": {"n": DIGITS}}
    assert first["source_cursor"] == {"lsn": "0/1"}
    assert abs(int(first["timestamp"]) - store.now()) < 100
    assert {key: first[key] for key in ("seq", "pipeline", "stream", "event_id")} == {
        "seq": "1",
        "pipeline": NAME,
        "stream": "dlq",
        "event_id": "event-1",
    }
    assert first["payload_truncated"] is False
    assert first["meta"] == {
        "sink_id": "cache",
        "error_kind": "routing",
        "error_message": "nowhere to go",
        "attempts": "1",
    }


def test_show(store: StateStore) -> None:
    """`show` prints everything about one entry, and its event unchanged."""
    shown = said("dlq", "show", NAME, "1")
    assert "routing: nowhere to go" in shown
    assert 'segment 1, ordinal 1; {"lsn":"0/1"}' in shown
    assert shown.splitlines()[-1] == f'{{"after":{{"n":{DIGITS}}}}}'
    assert json.loads(said("dlq", "show", NAME, "2", "--json"))["payload_truncated"] is True
    assert "has no dead letter 9" in refused("dlq", "show", NAME, "9")


def test_redrive(store: StateStore) -> None:
    """Entries are redriven by number, by sink or all; waiting ones follow without being named."""
    assert "say which entries" in refused("dlq", "redrive", NAME)
    assert "has no dead letter 9" in refused("dlq", "redrive", NAME, "1", "9")
    assert next(row.state for row in store.dead_letters.read(NAME)) == "dead"

    assert said("dlq", "redrive", NAME, "1").startswith("1 entry will be delivered again")
    found = json.loads(said("dlq", "redrive", NAME, "--sink", "bus", "--json"))
    assert found == {"pipeline": NAME, "redriven": 1}
    assert said("dlq", "redrive", NAME, "--all").startswith("1 entry ")
    states = [row.state for row in store.dead_letters.read(NAME)]
    assert states == ["redrive", "redrive", "waiting", "redrive"]


def test_ack_and_purge(store: StateStore) -> None:
    """Entries are discarded by number, up to a number, by sink or all."""
    assert "say which entries" in refused("dlq", "ack", NAME)
    assert "say which entries" in refused("dlq", "ack", NAME, "1", "--up-to", "2")
    assert said("dlq", "ack", NAME, "2") == "1 entry discarded.\n"
    found = json.loads(said("dlq", "ack", NAME, "--up-to", "3", "--json"))
    assert found == {"pipeline": NAME, "acked": 2}
    assert said("dlq", "purge", NAME, "--sink", "cache") == "0 entries discarded.\n"
    assert json.loads(said("dlq", "purge", NAME, "--json")) == {"pipeline": NAME, "purged": 1}
    assert store.dead_letters.read(NAME) == []


def test_status(store: StateStore) -> None:
    """`status` shows the number of dead letters and the command that lists them."""
    assert "dead letters: 3 changes could not be delivered, 1 on their way or behind them" in said(
        "status"
    )
    assert f"run: deltaforge dlq list {NAME}" in said("status")
    store.dead_letters.remove(NAME)
    assert "dead letters" not in said("status")
