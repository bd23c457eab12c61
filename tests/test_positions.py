"""Positions are ordered values, and their text says all of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.registry import parse_position

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"

binlog_positions = st.builds(
    BinlogPosition,
    file=st.builds(
        "{}.{:06}".format, st.sampled_from(["mysql-bin", "a.b", ""]), st.integers(1, 2**31 - 1)
    ),
    pos=st.integers(4, 2**64 - 1),
    gtid_set=st.none() | st.just("") | st.just(f"{SERVER}:1-57"),
)
lsn_positions = st.builds(
    LsnPosition,
    lsn=st.integers(0, 2**64 - 1),
    tx_id=st.none() | st.integers(0, 2**32 - 1),
)


@given(binlog_positions | lsn_positions)
def test_a_position_is_read_back_from_its_text(position: BinlogPosition | LsnPosition) -> None:
    """The text holds everything, also what is not compared."""
    again = parse_position(position.to_json())

    assert again == position
    assert again.to_json() == position.to_json()


@given(st.lists(st.tuples(st.integers(1, 2**31), st.integers(4, 2**40)), max_size=20))
def test_without_gtids_file_number_and_offset_decide(places: list[tuple[int, int]]) -> None:
    """The order is that of the log, and agrees with equality."""
    ordered = sorted(BinlogPosition(f"mysql-bin.{number:06}", pos) for number, pos in places)

    assert [(int(one.file.rpartition(".")[2]), one.pos) for one in ordered] == sorted(places)
    for one, next_one in itertools.pairwise(ordered):
        assert one < next_one or (one == next_one and hash(one) == hash(next_one))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(4, 99)), max_size=20))
def test_with_gtids_the_set_decides(steps: list[tuple[int, int, int]]) -> None:
    """What holds more is later, whatever its server calls its files; with equal sets, the place."""
    ordered = sorted(
        BinlogPosition(f"b.{number:06}", pos, f"{SERVER}:1-{last}") for last, number, pos in steps
    )

    assert [
        (len(one.gtid_set or ""), one.gtid_set, int(one.file[2:]), one.pos) for one in ordered
    ] == sorted(
        (len(text), text, number, pos)
        for last, number, pos in steps
        for text in (f"{SERVER}:1-{last}",)
    )


def test_the_file_after_999999_comes_after_it() -> None:
    """File numbers are numbers: text would put 1000000 before 999999."""
    assert BinlogPosition("mysql-bin.999999", 500) < BinlogPosition("mysql-bin.1000000", 4)


def test_a_position_gains_its_set() -> None:
    """One place of one log, with and without its set, is one position."""
    assert BinlogPosition("b.000001", 4) == BinlogPosition("b.000001", 4, f"{SERVER}:1")
    assert BinlogPosition("b.000001", 4, "") < BinlogPosition("b.000001", 4, f"{SERVER}:1")


def test_histories_that_differ_are_ordered_by_place() -> None:
    """Neither set holds the other: such positions are of two servers, and still have an order."""
    other = SERVER.replace("3e", "4e")
    one = BinlogPosition("b.000001", 9, f"{SERVER}:1")

    assert one < BinlogPosition("b.000002", 4, f"{other}:1")
    assert not BinlogPosition("b.000002", 4, f"{other}:1") < one


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        '{"file": "mysql-bin", "pos": 4}',
        '{"file": "mysql-bin.1"}',
        '{"file": "mysql-bin.1", "pos": -1}',
        '{"file": "mysql-bin.1", "pos": "x"}',
        '{"lsn": "x"}',
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """What is not a position says so."""
    with pytest.raises(CorruptLog, match="not a"):
        parse_position(text)
