"""What a read saw: the pure part, with every kind of server."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.snapshot.read_view import GtidReadView, PositionReadView
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.snapshot.read_view import XidReadView
from deltaforge_dagster.sources.registry import parse_read_view

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
START = LsnPosition(100)


def changes(
    tx_ids: list[str | None],
    files: list[str | None] | None = None,
    positions: list[int | None] | None = None,
) -> pa.Table:
    """Return captured changes, in two chunks with dictionaries of their own."""
    count = len(tx_ids)
    columns: dict[str, list[Any]] = {
        "tx_id": [*tx_ids],
        "file": files or [None] * count,
        "pos": positions or [None] * count,
    }
    parts = [
        pa.table({n: pa.array(c[cut], CAPTURED.field(n).type) for n, c in columns.items()})
        for cut in (slice(0, count // 2), slice(count // 2, None))
    ]
    return pa.concat_tables(parts)


@given(
    st.integers(3, 2**40),
    st.lists(st.integers(0, 2**30), max_size=5),
    st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=20),
)
def test_xids_of_32_bits_are_told_apart(xmax: int, behind: list[int], offsets: list[int]) -> None:
    """Of numbers near `xmax`, of which the log has 32 bits, those count as not visible that were running
    or not given out, also where the 32 bits have wrapped around.
    """  # noqa: D205 - one sentence
    running = sorted({max(xmax - 1 - one, 0) for one in behind})
    xids = [max(xmax + one, 0) for one in offsets] + running
    read_view = XidReadView.of(
        f"{min(running, default=xmax)}:{xmax}:{','.join(map(str, running))}", START
    )

    not_visible = read_view.not_visible(changes([str(xid % 2**32) for xid in xids])).to_pylist()

    assert not_visible == [xid >= xmax or xid in running for xid in xids]
    assert read_view.sees([str(x % 2**32) for x in xids]) == (not any(not_visible))
    assert parse_read_view(read_view.to_json()) == read_view


def test_a_long_commit_is_not_visible_wherever_it_stands() -> None:
    """A transaction in `xip` is not visible though its commit may stand long before the read's position."""
    read_view = XidReadView.of("700:710:700,705", START)
    assert read_view.not_visible(changes(["700", "701", "705", "710", None])).to_pylist() == [
        True, False, True, True, False,
    ]  # fmt: skip
    assert read_view.covers(LsnPosition(100))
    assert not read_view.covers(LsnPosition(101))
    assert not read_view.covers(BinlogPosition("b.1", 4))


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["", "tag"])), max_size=30))
def test_gtids_that_were_not_executed_are_not_visible(executed: list[tuple[int, str]]) -> None:
    """Whatever was executed, in whichever order and with tags: exactly the rest is not visible."""
    texts = [f"{SERVER}:{tag}:{n}" if tag else f"{SERVER}:{n}" for n, tag in executed]
    read_view = GtidReadView(",".join(texts))
    everything = [f"{SERVER}{tag}:{n}" for n in range(1, 61) for tag in ("", ":tag")]

    not_visible = read_view.not_visible(changes([*everything])).to_pylist()

    assert not_visible == [one not in texts for one in everything]
    assert parse_read_view(read_view.to_json()) == read_view


def test_what_gtids_cover() -> None:
    """A position is covered when all its transactions were executed; one in the log before that is not,
    wherever the file and the offset are. Changes without a GTID are not visible, snapshot rows are no changes.
    """  # noqa: D205 - two sentences
    read_view = GtidReadView(f"{SERVER}:1-5:7")
    assert read_view.covers(BinlogPosition("b.9", 9, f"{SERVER}:1-5"))
    assert not read_view.covers(BinlogPosition("b.1", 4, f"{SERVER}:1-6"))
    assert not read_view.covers(BinlogPosition("b.1", 4))
    not_visible = read_view.not_visible(
        changes([None, None, f"{SERVER}:6"], ["b.1", None, "b.1"], [9, None, 20])
    )
    assert not_visible.to_pylist() == [True, False, True]


def test_what_a_place_covers() -> None:
    """Behind the place everything is not visible: by the file's number, then by the offset."""
    read_view = PositionReadView(BinlogPosition("binlog.999999", 50))
    files = ["binlog.000009", "binlog.999999", "binlog.999999", "binlog.1000000", None]
    not_visible = read_view.not_visible(changes([None] * 5, [*files], [99, 50, 51, 4, None]))
    assert not_visible.to_pylist() == [False, False, True, True, False]
    assert read_view.covers(BinlogPosition("binlog.999999", 50, "0-1-7"))
    assert not read_view.covers(BinlogPosition("binlog.1000000", 4, "0-1-7"))
    assert parse_read_view(read_view.to_json()) == read_view


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"xmax": 1}', '{"file": "x", "pos": 1}'])
def test_other_texts_are_refused(text: str) -> None:
    """What is not a read view is refused, with nothing of it in the message."""
    with pytest.raises(CorruptLog):
        parse_read_view(text)


def test_nothing_is_asked_of_no_rows() -> None:
    """A segment without rows has no change that is not visible."""
    for read_view in (
        GtidReadView(""),
        PositionReadView(BinlogPosition("b.1", 4)),
        XidReadView(5, (), START),
    ):
        assert read_view.not_visible(changes([])).to_pylist() == []
