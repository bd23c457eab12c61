"""Tests of the text form of sizes, times and positions."""

from __future__ import annotations

import pytest

from deltaforge_dagster.cli.output import (
    answers,
    grid,
    moment,
    position,
)
from deltaforge_dagster.pipeline.plural import duration, pluralize, size
from deltaforge_dagster.sources.postgres.position import LsnPosition


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (13_000_000, "12.4 MiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_size(count: int, expected: str) -> None:
    """A size has the largest unit that fits."""
    assert size(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 entries"), (1, "1 entry"), (2, "2 entries"), (12_345, "12,345 entries")],
)
def test_counted(count: int, expected: str) -> None:
    """A counted noun is plural, unless the count is one."""
    assert pluralize(count, "entry", "entries") == expected
    assert pluralize(count, "row") == expected.replace("entries", "rows").replace("entry", "row")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-5, "0 s"), (0.4, "0 s"), (59.6, "1 min"), (65, "1 min 5 s"), (90_061, "1 d 1 h")],
)
def test_duration(seconds: float, expected: str) -> None:
    """A time span has its two largest units and is never negative."""
    assert duration(seconds) == expected


def test_moment() -> None:
    """A time is a date and a time of day."""
    assert len(moment(1_700_000_000)) == len("2023-11-14 22:13:20")


def test_position() -> None:
    """A position shows its fields, except those that are null."""
    assert position(LsnPosition(0x1234, 7).to_json()) == "lsn 0/00001234 tx_id 7"
    assert position(LsnPosition(0x1234).to_json()) == "lsn 0/00001234"
    assert position(None) == "-"


def test_tables_are_whole_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal each row is one line, unless COLUMNS limits the width."""
    name = "public." + "orders_of_the_year_" * 8
    monkeypatch.delenv("COLUMNS", raising=False)
    answers().print(grid(["table", "key"], [[name, "7"]]))
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    answers().print(grid(["table", "key"], [[name, "7"]]))
    folded = capsys.readouterr().out

    assert name in whole
    assert len(whole.splitlines()) == 2
    assert name not in folded


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in messages are printed, not read as a style."""
    answers().print("tables [public.orders] and [/bold] stay")

    assert capsys.readouterr().out == "tables [public.orders] and [/bold] stay\n"
