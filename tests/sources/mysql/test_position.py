"""GTIDs of MySQL against sets, and those of MariaDB against dictionaries of Python."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.position import (
    MAX_MARIADB_NUMBER,
    BinlogPosition,
    DomainGtids,
    GtidSet,
    is_of_mariadb,
)

A = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
B = "0d2e11fa-71ca-11e1-9e33-c80aa9429562"

sources = st.tuples(st.sampled_from([A, B]), st.sampled_from(["", "batch", "_b1"]))
intervals = st.lists(st.tuples(sources, st.integers(1, 40), st.integers(0, 6)), max_size=20)
Parts = list[tuple[tuple[str, str], int, int]]


def made(parts: Parts) -> GtidSet:
    """Return a set of these intervals: server and tag, first, how many more."""
    whole = GtidSet()
    for (server, tag), first, more in parts:
        whole.add(server, first, first + more, tag)
    return whole


def members(parts: Parts) -> set[tuple[tuple[str, str], int]]:
    """Return the same as a set of Python."""
    return {(s, number) for s, first, more in parts for number in range(first, first + more + 1)}


@given(intervals)
def test_a_set_holds_what_was_added(parts: Parts) -> None:
    """Intervals merge, whatever their order and overlap."""
    whole = made(parts)

    held = {
        ((server, tag), number)
        for server in (A, B)
        for tag in ("", "batch", "_b1")
        for number in range(60)
        if whole.contains(server, number, tag)
    }
    assert held == members(parts)


@given(intervals, intervals)
def test_equal_and_part_of_are_those_of_sets(parts: Parts, others: Parts) -> None:
    """How a set was put together does not show."""
    assert (made(parts) <= made(others)) == (members(parts) <= members(others))
    assert (made(parts) == made(others)) == (members(parts) == members(others))


@given(intervals)
def test_a_set_is_read_back_from_its_text_and_its_bytes(parts: Parts) -> None:
    """Both forms say everything."""
    whole = made(parts)

    assert GtidSet.parse(str(whole)) == whole
    assert GtidSet.from_bytes(whole.to_bytes()) == whole


def test_the_text_is_that_of_mysql() -> None:
    """Servers in order, intervals that touch are one, a single number has no hyphen."""
    text = f"{A.upper()}:5:1-2:3-4:9,\n{B}:1"

    assert str(GtidSet.parse(text)) == f"{B}:1,{A}:1-5:9"


def test_a_copy_grows_by_itself() -> None:
    """What is added to a copy is not in the first."""
    first = GtidSet.parse(f"{A}:1-5")
    second = first.copy()
    second.add(A, 6, 6)

    assert str(first) == f"{A}:1-5"
    assert str(second) == f"{A}:1-6"


@pytest.mark.parametrize("text", [f"{A}", f"{A}:0", f"{A}:2-1", "x:1", f"{A}:1-", f"{A}:1;2"])
def test_other_text_is_refused(text: str) -> None:
    """What is not a GTID set says so."""
    with pytest.raises(CorruptLog, match="GTID"):
        GtidSet.parse(text)


def test_tags_stand_behind_their_server() -> None:
    """As MySQL prints them; a tag that is none, or has no numbers, is no set."""
    text = f"{A}:b_2:7,{B}:1,{A}:Batch:1-3:5,{A}:9"

    assert str(GtidSet.parse(text)) == f"{B}:1,{A}:9:b_2:7:batch:1-3:5"
    for wrong in (f"{A}:1:batch", f"{A}:batch:b:1", f"{A}:2x:1", f"{A}:{'t' * 33}:1"):
        with pytest.raises(CorruptLog, match="not a GTID set"):
            GtidSet.parse(wrong)


def test_bytes_with_tags_are_those_of_the_server() -> None:
    """The form that MySQL 8.3 and later write once there is a tag; another form is refused."""
    sid = bytes.fromhex(A.replace("-", ""))
    data = struct.pack("<Q", 1 << 56 | 2 << 8 | 1)
    data += sid + b"\0" + struct.pack("<Qqq", 1, 1, 6)
    data += sid + b"\x0abatch" + struct.pack("<Qqq", 1, 3, 4)

    assert str(GtidSet.from_bytes(data)) == f"{A}:1-5:batch:3"
    assert GtidSet.from_bytes(data).to_bytes() == data
    with pytest.raises(CorruptLog, match="unknown form, 2"):
        GtidSet.from_bytes(struct.pack("<Q", 2 << 56))
    with pytest.raises(CorruptLog, match="invalid tag"):
        GtidSet.from_bytes(data.replace(b"batch", b"bat h"))


@pytest.mark.parametrize("cut", [3, 8, 30, 47])
def test_bytes_cut_short_are_refused(cut: int) -> None:
    """A set that ends too early is no set."""
    with pytest.raises(CorruptLog, match="truncated"):
        GtidSet.from_bytes(GtidSet.parse(f"{A}:1-5").to_bytes()[:cut])


domains = st.dictionaries(st.integers(0, 3), st.integers(1, 5), max_size=4)
DIGITS = "11111111-2222-1111-8888-c80aa9429562"


def reached(numbers: dict[int, int]) -> DomainGtids:
    """Return what stands at these numbers, all written by server 9."""
    whole = DomainGtids()
    for domain, number in numbers.items():
        whole.advance(domain, 9, number)
    return whole


@given(domains)
def test_a_position_is_read_back_from_its_text(numbers: dict[int, int]) -> None:
    """The text says everything, whatever the order in which domains came."""
    assert DomainGtids.parse(str(reached(numbers))) == reached(numbers)
    assert str(reached(numbers)) == ",".join(f"{d}-9-{n}" for d, n in sorted(numbers.items()))


@given(domains, domains)
def test_at_or_before_is_so_in_every_domain(one: dict[int, int], other: dict[int, int]) -> None:
    """A domain that is not named has had no transaction."""
    before = all(number <= other.get(domain, 0) for domain, number in one.items())

    assert (reached(one) <= reached(other)) == before


def test_one_number_by_two_servers_is_two_histories() -> None:
    """Servers that wrote independently have not executed each other's transactions."""
    one, other = DomainGtids.parse("0-1-5"), DomainGtids.parse("0-2-5")

    assert not one <= other
    assert not other <= one
    assert one != other


def test_a_number_that_does_not_rise_is_refused() -> None:
    """Such a position would say that what follows was read; the way out is named."""
    gtids = DomainGtids.parse("0-1-5,1-1-1")
    gtids.advance(1, 2, 2)

    with pytest.raises(CorruptLog, match=r"GTID 0-2-5 after 0-1-5: .* gtid_strict_mode"):
        gtids.advance(0, 2, 5)
    assert str(gtids) == "0-1-5,1-2-2"


@pytest.mark.parametrize(
    "text",
    [
        "0-1",
        "0-1-0",
        "0-1-5,0-1-6",
        "0-1-x",
        "4294967296-1-1",
        f"0-1-{MAX_MARIADB_NUMBER + 1}",
        DIGITS,
    ],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    """A position that cannot be read stops, whatever is wrong with it."""
    with pytest.raises(CorruptLog):
        DomainGtids.parse(text)


def test_the_notations_are_told_apart() -> None:
    """Also from a UUID of digits, which begins alike."""
    assert is_of_mariadb("0-1-5")
    assert is_of_mariadb("0-1-5, 1-1-7")
    assert not is_of_mariadb(f"{DIGITS}:1-5")
    assert not is_of_mariadb("")


def test_positions_of_mariadb_are_ordered() -> None:
    """By GTIDs, whatever the files are called; by the place where they do not say."""
    one = BinlogPosition("b.000009", 4, "0-1-5,1-1-7")

    assert one < BinlogPosition("b.000001", 4, "0-2-6,1-1-7")
    assert BinlogPosition("b.000009", 4, "") < one
    assert one == BinlogPosition("b.000009", 4, "1-1-7,0-1-5")
    assert one < BinlogPosition("b.000009", 5, "0-1-5,1-1-7")
    assert one < BinlogPosition("b.000010", 4, "0-2-5,1-1-7")
    assert one < BinlogPosition("b.000010", 4, f"{DIGITS}:1-5")
