"""Chains of processors over the rows of a segment."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.processors.chain import Chain, ChainSpec, identified
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.processors.rows import Row, batch, row

ORIGIN = EventOrigin("mysql", "orders-db", "acme")
_PROCESSORS: TypeAdapter[tuple[Processor, ...]] = TypeAdapter(tuple[Processor, ...])

MASK = {
    "type": "javascript", "id": "mask", "limits": {"cpu_ms": 5000, "timeout_ms": 30_000},
    "inline": "(e) => { if (e.after) e.after.email = '***'; return e; }",
}  # fmt: skip
CREATES = {"type": "filter", "ops": ["create"]}
FLATTEN = {"type": "flatten"}


def spec(*processors: dict[str, Any], **limits: Any) -> ChainSpec:
    """Return the chain for processors given as in a pipeline file."""
    return ChainSpec(_PROCESSORS.validate_json(json.dumps(processors)), ORIGIN, **limits)


def made(chain: ChainSpec, rows: Sequence[Row], rows_each: int = 100) -> list[dict[str, Any]]:
    """Return the output of a chain for a segment that is read in batches of `rows_each` rows."""
    whole = batch(list(rows))
    batches = [whole.slice(at, rows_each) for at in range(0, whole.num_rows, rows_each)]
    with Chain(chain) as one:
        return [event for found in one.run(batches) for event in found.to_pylist()]


def test_each_gets_what_the_one_before_it_made() -> None:
    """Processors run in the order of the file."""
    rows = [row(after='{"id":1,"user":{"name":"a"}}'), row(op="d")]

    found = made(spec(CREATES, FLATTEN, MASK), rows)

    assert [json.loads(one["after"]) for one in found] == [
        {"id": 1, "user__name": "a", "email": "***"}
    ]


def test_rows_are_renumbered() -> None:
    """The remaining rows are renumbered from 0 without gaps, over all batches."""
    rows = [row(op="c" if number % 3 else "u", ordinal=number) for number in range(10)]

    found = made(spec(CREATES), rows, rows_each=4)

    assert [one["ordinal"] for one in found] == list(range(6))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 7),
)
def test_transactions_end_once(kept: list[tuple[int, bool]], rows_each: int) -> None:
    """Whatever is dropped, `tx_end` is true on the last remaining row of each transaction."""
    ids = sorted(one for one, _ in kept)
    rows = [
        row(
            tx_id=f"tx-{tx}",
            tx_end=number == len(ids) - 1 or ids[number + 1] != tx,
            op="c" if kept[number][1] else "u",
            ordinal=number,
        )
        for number, tx in enumerate(ids)
    ]

    found = made(spec(CREATES), rows, rows_each)

    transactions = [one["tx_id"] for one in found]
    ends = [one["tx_id"] for one in found if one["tx_end"]]
    assert ends == sorted(set(transactions))
    for one, following in pairwise([*found, {"tx_id": None}]):
        assert one["tx_end"] == (one["tx_id"] != following["tx_id"])


def test_a_call_gets_so_many_rows_and_bytes() -> None:
    """A call gets at most the configured rows and bytes; a larger row is passed alone."""
    counting = {
        "type": "javascript", "id": "count", "limits": {"cpu_ms": 5000, "timeout_ms": 30_000},
        "inline": "function processBatch(es) { es.forEach((e) => { e.tags = [`${es.length}`]; }); }",
    }  # fmt: skip
    rows = [row(after=json.dumps({"text": "x" * size})) for size in (5, 5, 5, 5, 900, 5, 5)]

    by_rows = made(spec(counting, max_rows=3), rows)
    by_bytes = made(spec(counting, max_bytes=100), rows)

    assert [one["tags"] for one in by_rows] == ['["3"]'] * 6 + ['["1"]']
    assert [one["tags"] for one in by_bytes] == ['["4"]'] * 4 + ['["1"]'] + ['["2"]'] * 2


def test_everything_may_be_dropped() -> None:
    """A segment of which no row remains yields no rows."""
    assert made(spec({"type": "filter", "ops": ["truncate"]}), [row(), row()]) == []


def test_counts() -> None:
    """Each processor has counters of rows, calls and time, and its own counters.

    A processor for which no rows remain is not called.
    """
    with Chain(spec(CREATES, FLATTEN)) as chain:
        list(chain.run([batch([row(), row(op="u")]), batch([row(op="d")])]))

        assert all(one.pop("busy_us") > 0 for one in chain.counts.values())
        assert chain.counts == {
            "filter": {"events_in": 3, "events_out": 1, "filter_dropped": 2, "calls": 2},
            "flatten": {"events_in": 1, "events_out": 1, "calls": 1},
        }


def test_counts_of_a_processor_that_gets_nothing() -> None:
    """A processor that gets no rows has counters, too: nothing in, nothing out."""
    with Chain(spec({"type": "filter", "ops": ["truncate"]}, FLATTEN)) as chain:
        list(chain.run([batch([row()])]))

        assert chain.counts["flatten"] == {"events_in": 0, "events_out": 0}


def test_the_first_that_makes_an_event_is_its_mark() -> None:
    """A later processor does not mark again what an earlier one created or copied."""
    new = "{source: e.source, op: 'c', ts_ms: 7}"
    maker = {**MASK, "id": "maker", "inline": f"(e) => [e, {{...e}}, {new}]"}
    passing = {**MASK, "id": "passing", "inline": "(e) => ({...e, after: {}})"}
    adding = {**MASK, "id": "adding", "inline": f"(e) => e.synthetic ? [e, {new}] : e"}

    found = made(spec(maker, passing, FLATTEN, adding), [row()])

    assert [one["synthetic"] for one in found] == [None, None, "maker", "adding"]
    assert len({one["event_id"] for one in found}) == 4


def test_a_hash_tells_chains_apart() -> None:
    """The hash depends on every option and on the order, and on nothing else."""
    assert spec(CREATES, FLATTEN).hash == spec(CREATES, FLATTEN).hash
    assert (
        len({spec(*one).hash for one in ((CREATES, FLATTEN), (FLATTEN, CREATES), (CREATES,))}) == 3
    )
    assert spec(FLATTEN).hash != spec({**FLATTEN, "separator": "_"}).hash


def test_problems_are_found_without_an_event() -> None:
    """An invalid script is reported with its index in the list."""
    wrong = {"type": "javascript", "id": "wrong", "inline": "return +;"}

    ((number, text),) = spec(CREATES, wrong, MASK).problems()

    assert number == 1
    assert "SyntaxError" in text


def test_a_failure_ends_the_chain() -> None:
    """A failing processor stops the segment; the error has its id."""
    broken = {"type": "javascript", "id": "broken", "inline": "(e) => e.a.b.c"}

    with pytest.raises(Exception, match="processor broken: JS processor threw: TypeError"):
        made(spec(broken), [row()])


IDS = [str(uuid.UUID(int=number, version=4)) for number in range(6)]
GIVEN, OWN = IDS[:3], IDS[3:]


def settled(made: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the result for rows that a processor `p` returned for an input with the ids `GIVEN`."""
    return identified("p", batch([row(event_id=one) for one in GIVEN]), made).to_pylist()


def rows(*ids: str | None) -> pa.RecordBatch:
    """Return rows with these ids, which a processor may have omitted."""
    whole = batch([row(event_id=one or "", ordinal=number) for number, one in enumerate(ids)])
    place = whole.schema.get_field_index("event_id")
    return whole.set_column(place, "event_id", pa.array(ids, pa.string()))


@given(st.lists(st.sampled_from([*IDS, None, ""]), min_size=1, max_size=12))
def test_whatever_comes_back(ids: list[str | None]) -> None:
    """Every row has a unique id; the first row with an id keeps it; only rows with foreign ids are marked."""
    found = settled(rows(*ids))

    own = [one["event_id"] for one in found]
    assert len(set(own)) == len(own)
    assert all(uuid.UUID(one) for one in own)
    for row_, (before, after) in enumerate(zip(ids, own, strict=True)):
        if before and before not in ids[:row_]:
            assert after == before
    assert [one["synthetic"] for one in found] == [None if one in GIVEN else "p" for one in ids]
    assert found == settled(rows(*ids)), "the same whenever it is done"


def test_what_was_given_stays_as_it_is() -> None:
    """Input rows that are returned, even fewer of them or in another order, stay unchanged."""
    made = rows(*reversed(GIVEN[:2]))

    assert identified("p", rows(*GIVEN), made) is made


def test_a_mark_that_is_there_stays() -> None:
    """A row whose producer is already set keeps it."""
    made = batch([row(event_id=OWN[0], synthetic="mine"), row(event_id=OWN[1])])

    assert [one["synthetic"] for one in settled(made)] == ["mine", "p"]


def test_ids_of_two_processors_differ() -> None:
    """Copies of the same event by two processors are two events."""
    given_rows, made = rows(GIVEN[0]), rows(GIVEN[0], GIVEN[0], None)

    ids = {
        one["event_id"]
        for name in ("p", "q")
        for one in identified(name, given_rows, made).to_pylist()
    }

    assert len(ids) == 5
