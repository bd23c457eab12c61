"""Where a key's changes are, over a real journal and a real state store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import JournalDamaged, NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline.replay.key_search import Found, Wanted, search, segments_of
from deltaforge_dagster.state.records import Lease, Processed
from deltaforge_dagster.state.store import StateStore
from tests.chance import examples
from tests.journal.changes import Change, batch, change
from tests.state.make import NAME, dead_letter, deliver, held, new_segment, position


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal(f"file://{tmp_path}/journal")


class World:
    """A pipeline with a journal whose segments hold chosen changes, one range each."""

    def __init__(self, store: StateStore, journal: Journal, lease: Lease) -> None:
        self.store = store
        self.journal = journal
        self.lease = lease
        self.paths: list[str] = []

    def capture(self, number: int, changes: Sequence[Change]) -> None:
        """Write a segment, and its row."""
        written = self._written(number, changes)
        row = new_segment(
            number,
            path=written.path,
            rows=len(changes),
            bytes=written.bytes,
            counts=written.counts,
        )
        self.paths.append(written.path)
        with self.store.fenced(self.lease) as writer:
            opened = writer.ranges.open(position(number - 1), "spec-1", number)
            writer.segments.add(row, opened)
            writer.ranges.close(opened, "max_events", f"hash-{number}")

    def process(self, number: int, changes: Sequence[Change]) -> None:
        """Say what a chain of processors made of a segment."""
        made = self._written(number, changes) if changes else None
        done = Processed(
            number,
            "chain",
            made.path if made else None,
            made.checksum if made else None,
            made.content_hash if made else None,
            len(changes),
            made.bytes if made else 0,
            {},
        )
        with self.store.fenced(self.lease) as writer:
            writer.segments.add_processed([done])

    def find(self, key: str, *tables: str, ranges: tuple[int, int] | None = None) -> list[Found]:
        """Return a key's changes."""
        within = (None, None) if ranges is None else segments_of(self.store, NAME, ranges)
        wanted = Wanted(key)
        return list(search(self.store, self.journal, NAME, wanted, tables=tables, segments=within))

    def _written(self, number: int, changes: Sequence[Change]) -> WrittenSegment:
        writer = self.journal.writer(NAME, "uid", number, self.lease.epoch)
        writer.write(batch(list(changes)))
        return writer.close()


@pytest.fixture
def world(sqlite_store: StateStore, journal: Journal) -> World:
    """A pipeline with two sinks and an empty journal."""
    return World(sqlite_store, journal, held(sqlite_store, "cache", "search"))


def of_key(number: int, key: str, **columns: object) -> Change:
    """Return an insert with a key."""
    return change(number, key=key, op="c", before=None, after=key, table="orders") | columns


def test_every_change_and_what_each_sink_has(world: World) -> None:
    """In the log's order, with range, place, position, and the state of each sink to the row."""
    world.capture(1, [change(1), of_key(7, '{"id":7}'), change(2)])
    world.capture(2, [of_key(70, '{"id":70}'), of_key(8, '{"id":7}', op="d", table="items")])
    deliver(world.store, world.lease, "cache", 2)
    with world.store.fenced(world.lease) as writer:
        writer.checkpoints.advance("search", 1, 1, False, None)

    first, second = world.find("7")

    assert (first.table, first.op, first.range, first.segment, first.ordinal) == (
        "public.orders",
        "c",
        1,
        1,
        1,
    )
    assert first.position == "0/000003EF"
    assert first.sinks == {"cache": "delivered", "search": "delivered"}
    assert (second.table, second.op, second.segment, second.ordinal) == ("public.items", "d", 2, 1)
    assert second.sinks == {"cache": "delivered", "search": "waiting"}
    assert [one.table for one in world.find("7", "items")] == ["public.items"]
    assert [one.table for one in world.find("7", "public.orders")] == ["public.orders"]
    assert [one.segment for one in world.find("7", ranges=(2, 2))] == [2]
    assert world.find('{"id": 7}') == [first, second]
    assert world.find('{"id": "7", "other": 1}') == []
    with pytest.raises(NotAllowed, match="no range 3"):
        world.find("7", ranges=(1, 3))


def test_an_update_of_a_key_belongs_to_both(world: World) -> None:
    """It is found by what the key was, and by what it became."""
    moved = of_key(9, '{"id":9}', op="u", before='{"id":8,"note":"9"}', after='{"id":9}')
    world.capture(1, [moved, of_key(10, '{"id":10}')])

    (by_new,), (by_old,) = world.find("9"), world.find("8")

    assert by_new == by_old
    assert (by_new.old_key, by_new.key) == ('{"id":8}', '{"id":9}')


def test_what_processors_made_of_it(world: World) -> None:
    """A change that they dropped never comes; one that they moved counts at its new place."""
    world.capture(1, [of_key(1, '{"id":1}'), of_key(2, '{"id":2}'), of_key(3, '{"id":3}')])
    world.process(1, [of_key(3, '{"id":3}'), of_key(2, '{"renamed":2}')])
    with world.store.fenced(world.lease) as writer:
        writer.checkpoints.advance("cache", 1, 0, False, None)
    deliver(world.store, world.lease, "search", 1)

    assert world.find("1")[0].sinks == {"cache": "dropped", "search": "dropped"}
    assert world.find("2")[0].sinks == {"cache": "waiting", "search": "delivered"}
    assert world.find("3")[0].sinks == {"cache": "delivered", "search": "delivered"}


def test_dead_letters_and_sinks_that_came_or_went(world: World) -> None:
    """A dead letter is named with its number; a later sink never gets it, a detached one nothing."""
    world.capture(1, [of_key(1, '{"id":1}')])
    letter = dead_letter(1, event_id=str(of_key(1, "{}")["event_id"]), ordinal=0)
    with world.store.fenced(world.lease) as writer:
        writer.dead_letters.add("cache", [letter], max_entries=10, overflow="block")
        writer.checkpoints.detach("search", "the journal is full")
    world.store.pipelines.register(NAME, "spec-2", ["cache", "search", "late"], {"late": "tail"})

    (found,) = world.find("1")

    assert found.sinks == {"cache": "dead letter 1", "search": "detached", "late": "never"}


def test_dead_letters_that_are_no_longer_there(world: World) -> None:
    """Given up is not delivered, and the same of one that processors moved; delivered again is.

    Before the checkpoint has passed it, and after the sink was set back, the change still comes.
    """
    rows = [of_key(one, f'{{"id":{one}}}') for one in range(4)]
    world.capture(1, rows)
    world.process(1, [rows[2], rows[1], rows[3]])
    letters = [
        dead_letter(one, event_id=str(rows[change]["event_id"]), ordinal=one, place=one)
        for one, change in enumerate([2, 1, 3])
    ]
    with world.store.fenced(world.lease) as writer:
        writer.dead_letters.add("cache", letters, max_entries=2, overflow="reject")
    world.store.dead_letters.remove(NAME, seqs=[1])

    assert [world.find(f"{one}")[0].sinks["cache"] for one in range(4)] == [
        "dropped",
        "dead letter 2",
        "waiting",
        "waiting",
    ]

    deliver(world.store, world.lease, "cache", 1)
    with world.store.fenced(world.lease) as writer:
        writer.dead_letters.redriven([2])

    assert [world.find(f"{one}")[0].sinks["cache"] for one in range(4)] == [
        "dropped",
        "delivered",
        "dead letter, acknowledged",
        "dead letter, rejected",
    ]
    with world.store.fenced(world.lease) as writer:
        writer.checkpoints.resume_at("cache", 1, 0, False, notice=None)
    assert world.find("2")[0].sinks["cache"] == "dead letter, acknowledged"
    assert world.find("3")[0].sinks["cache"] == "waiting"


def test_a_file_that_is_gone(world: World) -> None:
    """An error, unless retention has removed the segment, too."""
    world.capture(1, [of_key(1, '{"id":1}')])
    world.journal.delete(world.paths[0])

    with pytest.raises(JournalDamaged):
        world.find("1")


@pytest.mark.parametrize("text", ["", ",", "{}", '{"id":', "{1}"])
def test_what_is_no_key(text: str) -> None:
    """One sentence says how to write it."""
    with pytest.raises(NotAllowed, match="the key is"):
        Wanted(text)


_VALUES = st.integers() | st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=examples(60))
@given(values=st.lists(st.tuples(_VALUES, _VALUES.filter(lambda one: one != "")), min_size=1))
def test_a_composite_key_is_found_by_its_object(values: list[tuple[object, object]]) -> None:
    """Whatever letters or digits it has, and no other; a number is found by its digits."""
    keys = [json.dumps({"a": a, "b": b}, ensure_ascii=False) for a, b in values]
    texts = [(str(a), str(b)) for a, b in values]
    for key, text in zip(keys, texts, strict=True):
        same = [number for number, other in enumerate(texts) if other == text]

        assert Wanted(key).among(pa.array(keys)) == same
