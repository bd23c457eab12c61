"""Changes that cannot be decoded now are held: kept as they are, and come as if they never had been."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import CorruptLog, SourceMisconfigured, UnsupportedEvent
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.sources.postgres.decode.parked_events import ParkedChange, parse_parked
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.testing.sources import (
    Taken,
    Versions,
    insert,
    take,
)
from deltaforge_lab.synthetic import postgres_messages as samples
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.decode.test_decoder import decode, make_decoder, rows_of, transaction
from tests.sources.postgres.reference import Catalog

FULL, PLAIN, OTHER = 5, 6, 7
COLUMNS = [("id", 20, -1, True), ("name", 25, -1, True)]
DESCRIBED = (
    samples.relation(FULL, "public", "full", COLUMNS, "f"),
    samples.relation(PLAIN, "public", "plain", COLUMNS[:1]),
    samples.relation(OTHER, "public", "other", COLUMNS[:1]),
)
FITTING, RENAMED = Catalog({FULL: ("id",)}), Catalog({FULL: ("number",)})


def held(batches: list[ChangeBatch]) -> list[ParkedEvent]:
    """Return everything that is to be kept back."""
    return [event for batch in batches for event in batch.parked]


def released(events: list[ParkedEvent], **changed: Any) -> list[dict[str, Any]]:
    """Return the rows of held events."""
    decoder = make_decoder(**{"catalog": FITTING} | changed)
    found = decoder.decode_parked(iter(event.data for event in events))
    return [row for batch in found for row in batch.to_pylist()]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by their place, without what depends on the registry and on other tables."""
    rows = [
        {**row, "tx_end": None, "schema_version": None, "schema_sequence": None} for row in rows
    ]
    return sorted(rows, key=lambda row: (row["tx_id"], row["row"]))


def change(number: int) -> st.SearchStrategy[bytes]:
    """Return changes of one row of any of the tables, and truncates of several."""
    key, both = [str(number).encode()], [str(number).encode(), b"x"]
    return st.sampled_from(
        [
            samples.insert(FULL, both),
            samples.update(FULL, both, both, b"O"),
            samples.delete(FULL, both, b"O"),
            samples.insert(PLAIN, key),
            samples.insert(OTHER, key),
            samples.truncate([PLAIN, FULL, OTHER]),
            samples.truncate([FULL], 3),
            samples.message(number, "m", b"{}"),
        ]
    )


@given(st.data())
def test_held_changes_are_what_they_would_have_been(data: st.DataObject) -> None:
    """With the others they make what a decoder that holds nothing makes, in each transaction.

    A position comes only behind the held changes before it, and no batch of a transaction that is open
    has one.
    """
    stream, sizes = b"", data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    for number, size in enumerate(sizes):
        changes = [data.draw(change(row)) for row in range(size)]
        described = DESCRIBED if number == 0 else ()
        stream += transaction(*described, *changes, lsn=1000 * (number + 1), xid=number + 1)
    captures: dict[str, Any] = {"captures": lambda _, table: table != "other"}
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
    whole, _ = decode(stream, catalog=FITTING, **captures)
    parts, error = decode(stream, tuple(sorted(cuts)), catalog=RENAMED, **captures)

    kept = held(parts)
    back = released(kept)
    assert error is None
    assert {event.table for event in kept} <= {"public.full"}
    assert all(row["table"] != "full" for row in rows_of(parts))
    assert comparable(rows_of(parts) + back) == comparable(rows_of(whole))
    last = {row["tx_id"]: number for number, row in enumerate(back)}
    assert [row["tx_end"] for row in back] == [n in last.values() for n in range(len(back))]
    assert [batch.end for batch in parts if batch.end][-1:] == [b.end for b in whole if b.end][-1:]
    done = 0
    for batch in parts:
        for event in batch.parked:
            assert parse_parked(event.data).tx[1] > done
        done = done if batch.end is None else batch.end.lsn  # type: ignore[attr-defined]
    assert sum(batch.log_bytes for batch in parts) <= len(stream)


def test_a_table_stays_held() -> None:
    """Also changes that could be decoded, and those of a run that begins later."""
    good, bad = DESCRIBED[0], samples.relation(FULL, "public", "full", [("a", 77_777, -1, False)])
    stream = transaction(
        bad, samples.insert(FULL, [b"x"]), good, samples.insert(FULL, [b"1", b"x"])
    )
    batches, error = decode(stream, catalog=FITTING)
    later, _ = decode(
        transaction(good, samples.insert(FULL, [b"1", b"x"])),
        catalog=FITTING, holds={"public.full": "why"},
    )  # fmt: skip

    assert error is None
    assert not rows_of(batches) + rows_of(later)
    assert "column a, at 0/0000041A: type 77777 is no longer" in held(batches)[1].reason
    assert [event.reason for event in held(later)] == ["why"]


def test_what_still_cannot_be_decoded_says_so() -> None:
    """Nothing is guessed, and damage is named."""
    batches, _ = decode(
        transaction(DESCRIBED[0], samples.insert(FULL, [b"1", b"x"])), catalog=RENAMED
    )
    (event,) = held(batches)

    with pytest.raises(UnsupportedEvent, match=r"today's primary key \(number\)"):
        released([event], catalog=RENAMED)
    kept = parse_parked(event.data)
    damaged = ParkedChange(kept.tx, kept.index, kept.description, kept.change[:-1] + b"\xff")
    with pytest.raises(CorruptLog):
        released([ParkedEvent(event.table, "", damaged.data())])
    with pytest.raises(CorruptLog, match="cannot be read"):
        parse_parked(event.data[:20])


def test_a_truncate_of_a_table_that_was_never_described_is_damage() -> None:
    """Also beside one that is held."""
    batches, error = decode(
        transaction(DESCRIBED[0], samples.truncate([FULL, 99])), catalog=RENAMED
    )

    assert isinstance(error, CorruptLog)
    assert "never described" in str(error)
    assert len(held(batches)) == 1


def test_what_is_hidden_is_not_held() -> None:
    """What is kept is the log as it is; a table with hidden columns stops the pipeline instead."""
    rules = ColumnRules(ColumnOptions(exclude=("full.name",)))
    stream = transaction(DESCRIBED[0], samples.insert(FULL, [b"1", b"secret"]))
    batches, error = decode(stream, catalog=RENAMED, rules=rules)

    assert isinstance(error, SourceMisconfigured)
    assert "not held meanwhile" in str(error)
    assert not held(batches)


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


@pytest.mark.postgres
def test_tables_of_a_server_wait_until_they_can_be_read(bench: PostgresBench) -> None:
    """An array of a type that was dropped, a key that was renamed: the other tables go on.

    Once the type is there again, and the key is called as it was, nothing is missing.
    """
    bench.execute(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE TABLE moods (id int PRIMARY KEY, m mood[])",
        "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
        "ALTER TABLE keyed REPLICA IDENTITY FULL",
    )
    tables = ("public.orders", "public.moods", "public.keyed")
    start = bench.source(tables=tables).ensure_start()
    bench.execute(
        insert("orders", 1), "INSERT INTO moods VALUES (1, '{sad,NULL}')", insert("keyed", 1)
    )
    bench.execute("UPDATE keyed SET v = 'new'", insert("orders", 2))
    bench.execute(
        "ALTER TABLE moods ALTER m TYPE text", "DROP TYPE mood",
        "ALTER TABLE keyed RENAME id TO number",
    )  # fmt: skip

    def enough(taken: Taken) -> bool:
        return len(taken.rows) == 2 and taken.batches[-1].end is not None

    taken = take(bench, start, enough, source=bench.source(tables=tables))
    kept = held(taken.batches)
    assert [row["table"] for row in taken.rows] == ["orders", "orders"]
    assert [event.table for event in kept] == ["public.moods", "public.keyed", "public.keyed"]
    assert "type public._mood" in kept[0].reason
    assert "today's primary key (number)" in kept[1].reason

    def release(table: str, **fix: Any) -> list[tuple[Any, ...]]:
        events = (event.data for event in kept if event.table == f"public.{table}")
        fields = json.dumps({"db": "public", "table": table} | fix)
        batches = bench.source().decode_parked(events, fields, taken.end, Versions())
        rows = [row for batch in batches for row in batch.to_pylist()]
        return [(row["op"], row["before"], row["after"], row["key"]) for row in rows]

    with pytest.raises(UnsupportedEvent, match="may have been an array"):
        release("moods", catalog=True)
    bench.execute("CREATE TYPE mood AS ENUM ('glad')", "ALTER TABLE keyed RENAME number TO id")
    with pytest.raises(UnsupportedEvent, match="may have been an array"):
        release("moods")
    with pytest.raises(UnsupportedEvent, match="without --create-table"):
        release("moods", create_table="CREATE TABLE moods ()")
    assert release("moods", catalog=True) == [
        ("c", None, '{"id":1,"m":["sad",null]}', '{"id":1}'),
    ]
    assert release("keyed") == [
        ("c", None, '{"id":1,"v":"1"}', '{"id":1}'),
        ("u", '{"id":1,"v":"1"}', '{"id":1,"v":"new"}', '{"id":1}'),
    ]
