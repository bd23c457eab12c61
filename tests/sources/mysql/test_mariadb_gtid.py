"""MariaDB's GTIDs, against dictionaries of Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.mariadb_gtid import MAX_NUMBER, DomainGtids, is_of_mariadb
from deltaforge_dagster.sources.mysql.position import BinlogPosition

domains = st.dictionaries(st.integers(0, 3), st.integers(1, 5), max_size=4)
UUID = "11111111-2222-1111-8888-c80aa9429562"


def made(numbers: dict[int, int]) -> DomainGtids:
    """Return what stands at these numbers, all written by server 9."""
    whole = DomainGtids()
    for domain, number in numbers.items():
        whole.advance(domain, 9, number)
    return whole


@given(domains)
def test_it_is_read_back_from_its_text(numbers: dict[int, int]) -> None:
    """The text says everything, whatever the order in which domains came."""
    assert DomainGtids.parse(str(made(numbers))) == made(numbers)
    assert str(made(numbers)) == ",".join(f"{d}-9-{n}" for d, n in sorted(numbers.items()))


@given(domains, domains)
def test_at_or_before_is_so_in_every_domain(one: dict[int, int], other: dict[int, int]) -> None:
    """A domain that is not named has had no transaction."""
    before = all(number <= other.get(domain, 0) for domain, number in one.items())

    assert (made(one) <= made(other)) == before


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
    ["0-1", "0-1-0", "0-1-5,0-1-6", "0-1-x", "4294967296-1-1", f"0-1-{MAX_NUMBER + 1}", UUID],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    """A position that cannot be read stops, whatever is wrong with it."""
    with pytest.raises(CorruptLog):
        DomainGtids.parse(text)


def test_the_notations_are_told_apart() -> None:
    """Also from a UUID of digits, which begins alike."""
    assert is_of_mariadb("0-1-5")
    assert is_of_mariadb("0-1-5, 1-1-7")
    assert not is_of_mariadb(f"{UUID}:1-5")
    assert not is_of_mariadb("")


def test_positions_of_mariadb_are_ordered() -> None:
    """By GTIDs, whatever the files are called; by the place where they do not say."""
    one = BinlogPosition("b.000009", 4, "0-1-5,1-1-7")

    assert one < BinlogPosition("b.000001", 4, "0-2-6,1-1-7")
    assert BinlogPosition("b.000009", 4, "") < one
    assert one == BinlogPosition("b.000009", 4, "1-1-7,0-1-5")
    assert one < BinlogPosition("b.000009", 5, "0-1-5,1-1-7")
    assert one < BinlogPosition("b.000010", 4, "0-2-5,1-1-7")
    assert one < BinlogPosition("b.000010", 4, f"{UUID}:1-5")
