"""A script over batches of the change frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.processors.chain import identified
from deltaforge_dagster.processors.javascript import JavaScript
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.processors.rows import Row, batch, position_fields, row, rows
from tests.processors.test_v8 import PATIENT

ORIGIN = EventOrigin("postgresql", "orders-db", "acme", position_fields("postgresql"))

Make = Callable[[str], JavaScript]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Make]:
    """Create processors, and close them after the tests."""
    with ExitStack() as stack:

        def make(source: str) -> JavaScript:
            made = JavaScript("js", source, PATIENT, ORIGIN)
            stack.callback(made.close)
            return made

        yield make


def made(script: JavaScript, given_rows: list[Row]) -> list[dict[str, Any]]:
    """Return a script's result for rows, with ids; the result is a valid change frame."""
    whole = batch(given_rows)
    found: pa.RecordBatch = identified("js", whole, script.process(whole))
    found.validate(full=True)
    assert found.schema.names == FRAME.names
    assert [one.type for one in found.schema] == [one.type for one in FRAME]
    return found.to_pylist()


@pytest.fixture(scope="module")
def nothing(scripts: Make) -> JavaScript:
    """A script that returns copies of its input."""
    return scripts("(e) => ({...e})")


@given(st.lists(rows, min_size=1, max_size=20, unique_by=lambda one: one["event_id"]))
def test_what_a_script_leaves_alone_stays(nothing: JavaScript, given_rows: list[Row]) -> None:
    """For any rows, a script that changes nothing leaves every column unchanged."""
    assert made(nothing, given_rows) == batch(given_rows).to_pylist()


def test_only_what_changed_differs(scripts: Make) -> None:
    """Only the changed field is replaced; images, log position, key and transaction of the row stay."""
    script = scripts("(e) => { e.after.name = 'x'; e.tags = ['seen']; return e; }")
    given_row = row(before='{"a": 1}', after='{"id":12345678901234567890,"price":1.10}')

    (found,) = made(script, [given_row])

    assert found == {
        **given_row,
        "after": '{"id":12345678901234567890,"price":1.10,"name":"x"}',
        "tags": '["seen"]',
        "synthetic": None,
    }


def test_other_fields_are_read_back(scripts: Make) -> None:
    """`op`, `ts_ms` and names can be changed; changes of other fields are lost."""
    script = scripts(
        "(e) => { e.op = 'u'; e.ts_ms = 5; e.source.table = 't'; e.source.db = 'd';"
        " delete e.source.schema; e.processed_at = 1; e.source.lsn = '0/0'; return e; }"
    )

    (found,) = made(script, [row()])

    names = ("op", "ts_us", "db", "schema", "table", "pos")
    assert [found[one] for one in names] == ["u", 5000, "d", None, "t", row()["pos"]]


def test_drops_and_order(scripts: Make) -> None:
    """The returned events are passed on, in that order."""
    script = scripts("function processBatch([a, b, c]) { return [c, a]; }")
    given_rows = [row(event_id=f"{number}" * 36) for number in range(3)]

    found = made(script, given_rows)

    assert [one["event_id"][0] for one in found] == ["2", "0"]


def test_copies_have_ids_of_their_own(scripts: Make) -> None:
    """The first copy has the event's id, the others always get the same derived ids."""
    script = scripts("(e) => [e, {...e}, {...e}]")

    first, again = made(script, [row()]), made(script, [row()])

    ids = [one["event_id"] for one in first]
    assert ids[0] == row()["event_id"]
    assert len(set(ids)) == 3
    assert first == again
    assert {one["synthetic"] for one in first} == {None}


def test_new_events(scripts: Make) -> None:
    """An event without an id of the batch gets the log position of the one before it, and is marked."""
    script = scripts(
        "(e) => [e, {source: {db: 'x', table: 'new'}, op: 'c', ts_ms: 7, after: {n: 1}}]"
    )

    found = made(script, [row()])

    assert found[1]["synthetic"] == "js"
    assert found[1]["after"] == '{"n":1}'
    assert (found[1]["db"], found[1]["schema"], found[1]["table"]) == ("x", None, "new")
    assert (found[1]["pos"], found[1]["tx_id"]) == (row()["pos"], row()["tx_id"])
    assert found[1]["key"] is None
    assert found[1]["event_id"] not in {None, found[0]["event_id"]}


def test_marks_that_a_script_sets_itself(scripts: Make) -> None:
    """A script can mark a copy, choose the mark of a new event, and remove marks."""
    script = scripts(
        "(e) => [{...e, synthetic: undefined}, {...e, synthetic: 'fan-out'},"
        " {source: e.source, op: 'c', ts_ms: 7, synthetic: 'made by hand'}]"
    )

    found = made(script, [row(synthetic="before")])

    assert [one["synthetic"] for one in found] == [None, "fan-out", "made by hand"]
    assert len({one["event_id"] for one in found}) == 3


def test_a_new_event_keeps_its_own_id(scripts: Make) -> None:
    """An id that the script sets is kept, and the event is marked, because the id is not in the batch."""
    own = "0192f0c1-0000-7000-8000-0000000000ff"
    script = scripts(f"(e) => [e, {{...e, event_id: '{own}'}}]")

    found = made(script, [row()])

    assert [one["event_id"] for one in found] == [row()["event_id"], own]
    assert [one["synthetic"] for one in found] == [None, "js"]


def test_a_new_event_must_be_one(scripts: Make) -> None:
    """A new event without the required fields stops the batch."""
    with pytest.raises(ProcessorFailed, match="failed to decode events from JS"):
        made(scripts("(e) => ({hello: 1})"), [row()])


def test_routes(scripts: Make) -> None:
    """A route replaces the previous one; an event without a new route keeps its own."""
    script = scripts(
        "function processBatch([a, b]) { a.route({topic: 't', headers: {n: '1'}}); return [a, b]; }"
    )
    before = {"topic": "old", "route_key": "k", "headers": '{"h":"1"}'}
    given_rows = [row(**before), row(**before, event_id="b" * 36)]

    found = made(script, given_rows)

    assert [found[0][one] for one in before] == ["t", None, '{"n":"1"}']
    assert {one: found[1][one] for one in before} == before


@pytest.mark.parametrize(
    "source",
    [
        "(e) => { e.op = 'x'; return e; }",
        "(e) => { e.ts_ms = 'now'; return e; }",
        "(e) => { e.tags = 'one'; return e; }",
        "(e) => { e.tags = [1]; return e; }",
        "(e) => { e.source = null; return e; }",
        "(e) => { e.source.table = 1; return e; }",
        "(e) => { e.synthetic = 1; return e; }",
        "(e) => ({...e, event_id: 'mine'})",
        "(e) => { e.route({topic: {}}); return e; }",
        "(e) => { e.route({headers: ['x']}); return e; }",
    ],
)
def test_fields_that_are_none_stop_the_batch(scripts: Make, source: str) -> None:
    """Values that no event can have are rejected, and nothing of the batch is passed on."""
    with pytest.raises(ProcessorFailed, match="processor js: the script returned"):
        made(scripts(source), [row()])


def test_an_empty_batch_is_not_given_to_the_script(scripts: Make) -> None:
    """An empty batch is returned without calling the script."""
    script = scripts("function processBatch() { throw new Error('called'); }")

    assert script.process(batch([row()]).slice(0, 0)).num_rows == 0


def test_raw_payloads_are_events_to_a_script(scripts: Make) -> None:
    """The script gets the complete event even if its message is only the payload."""
    (found,) = made(scripts("(e) => { e.after.n = e.table; return e; }"), [row(raw_payload=True)])

    assert json.loads(found["after"]) == {"id": 1, "n": "public.orders"}
    assert found["raw_payload"]
