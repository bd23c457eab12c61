"""Rows of tables: which are inspected, which of their values are documents, and where they differ."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from itertools import pairwise
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.sensing import Sampling, SchemaSensing
from deltaforge_dagster.sensing.drift import declared
from deltaforge_dagster.sensing.learning import COLUMNS, SensedTables, restored
from deltaforge_dagster.sensing.table import TableSense, chosen
from tests.chance import examples
from tests.processors.rows import Row, batch, dumps, row
from tests.sensing.reference import Reference, type_of

TABLE = "public.orders"
VERSION = "sha256:00ff"
COLUMN_TYPES = {
    "id": ("integer", False),
    "small": ("smallint", True),
    "flag": ("boolean", True),
    "code": ("character varying(3)", True),
    "total": ("numeric(5,2)", True),
    "doc": ("jsonb", True),
    "note": ("text", True),
    "born": ("date", True),
}
VERSIONS = {
    TABLE: {
        VERSION: tuple(
            declared(name, data_type, nullable=nullable)
            for name, (data_type, nullable) in COLUMN_TYPES.items()
        )
    }
}


def taken(options: SchemaSensing, rows: list[Row], cuts: list[int] | None = None) -> TableSense:
    """Return what is learned about the table when rows arrive in parts, between which the state is stored."""
    states: dict[str, bytes] = {}
    for start, stop in pairwise(sorted({0, len(rows), *(cut % len(rows) for cut in cuts or ())})):
        tables = SensedTables(options, VERSIONS, states)
        tables.accept(batch(rows[start:stop]).select(list(COLUMNS)))
        states |= {one.table: one.state for one in tables.learned()}
    return restored(options, states[TABLE])


@given(st.integers(0, 30), st.integers(-1, 7), st.lists(st.integers(0, 40), max_size=6))
def test_sampling(warm: int, rate: int, sizes: list[int]) -> None:
    """The first events are inspected, and then one in `sample_rate`, counted over all batches."""
    sampling = Sampling(warmup_events=warm, sample_rate=rate)
    seen, found = 0, []
    for size in sizes:
        found += [seen + one for one in chosen(sampling, seen, size).tolist()]
        seen += size

    step = max(rate, 1)
    assert found == [n for n in range(seen) if n < warm or (n - warm) % step == 0]


values = {
    "id": st.none() | st.integers(-5, 2**31 + 5) | st.text(max_size=2),
    "small": st.none() | st.sampled_from([1, -32768, 32767, 32768, -32769, "7", 1.5]),
    "flag": st.none() | st.booleans() | st.just({}),
    "code": st.none() | st.sampled_from(["", "äää", "abcd", 'a"b', 5, {"_base64": "AA=="}]),
    "total": st.none() | st.sampled_from(["999.99", "1000.00", "-999.1", "NaN", 12, 1234.5]),
    "doc": st.none() | st.sampled_from([{"a": 1}, {"a": "x"}, [], 5, "s", '{"a":2}', {"_unchanged": True}]),
    "note": st.none() | st.sampled_from(["text", '{"b":1}', "[1", '["x"]', 7]),
    "born": st.none() | st.sampled_from(["2026-01-01", 20_000]),
    "extra": st.just(1),
}  # fmt: skip
images = st.fixed_dictionaries(
    {"id": values["id"]}, optional={k: v for k, v in values.items() if k != "id"}
)


def problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a value, according to the documented rules."""
    if name not in COLUMN_TYPES:
        return "undeclared_column"
    if value is None:
        return None if COLUMN_TYPES[name][1] else "unexpected_null"
    kind = type_of(value)
    if kind == "object" and value.keys() & {"_base64", "_unchanged"}:
        return None
    allowed = {
        "id": {"integer", "string"},
        "small": {"integer", "string"},
        "flag": {"boolean", "integer", "string"},
        "code": {"string"},
        "total": {"integer", "number", "string"},
        "note": {"string"},
    }
    if name in allowed and kind not in allowed[name]:
        return "type_mismatch"
    whole = str(value).lstrip("-").partition(".")[0]
    limits = {"id": (-(2**31), 2**31 - 1), "small": (-32768, 32767)}
    outside = (
        (name == "code" and len(value) > 3)
        or (name == "total" and whole.isdigit() and len(whole) > 3)
        or (name in limits and whole.isdecimal() and whole.isascii()
            and not limits[name][0] <= int(value) <= limits[name][1])
    )  # fmt: skip
    return "value_out_of_range" if outside else None


def documents_of(name: str, value: Any) -> list[str]:
    """Return the document that a column's value is or contains, if any."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        if isinstance(inner, dict | list):
            return [value]
    if name == "doc" and value is not None and value != {"_unchanged": True}:
        return [dumps(value)]
    return []


@settings(max_examples=examples(50))
@given(
    st.lists(images, min_size=1, max_size=30),
    st.sampled_from([0, 4, 100]),
    st.lists(st.integers(0, 100), max_size=3),
)
def test_equals_the_reference(stream: list[dict[str, Any]], most: int, cuts: list[int]) -> None:
    """The drift of each column and kind, and the schemas of columns, are the same as row by row."""
    options = SchemaSensing.model_validate(
        {
            "enabled": True,
            "sampling": {"warmup_events": 5, "sample_rate": 2},
            "deep_inspect": {"max_sample_size": most},
        }
    )
    rows = [row(after=dumps(one), ts_us=number + 1) for number, one in enumerate(stream)]
    looked_at = [one for n, one in enumerate(stream) if n < 5 or (n - 5) % 2 == 0]
    problems: Counter[tuple[str, str]] = Counter()
    schemas = {name: Reference(options) for name in ("doc", "note")}
    drifted = 0
    for one in looked_at:
        found = {(name, kind) for name, value in one.items() if (kind := problem(name, value))}
        for name, schema in schemas.items():
            for text in documents_of(name, one.get(name)):
                if schema.observe(text):
                    found.add((name, "json_structure_change"))
        problems.update(found)
        drifted += bool(found)

    table = taken(options, rows, cuts)

    assert {
        (name, kind): count
        for name, column in table.drift.columns.items()
        for kind, count in column.counts.items()
    } == dict(problems)
    assert (table.events, table.drift.analyzed) == (len(stream), len(looked_at))
    assert table.drift.drifted == drifted
    present = Counter(name for one in looked_at for name in one if name in COLUMN_TYPES)
    assert table.drift.present == present
    assert table.drift.missing(1) == [name for name in COLUMN_TYPES if name not in present]
    for name, schema in schemas.items():
        if schema.documents:
            assert table.columns[name].fingerprint == schema.fingerprint
            assert table.columns[name].sequence == schema.sequence
        else:
            assert name not in table.columns


def test_examples_are_few_and_short() -> None:
    """Five examples of at most 100 characters are kept for a column that differs."""
    stream = [row(after=dumps({"id": 1, "code": f"{n}" * 200})) for n in range(9)]

    column = taken(SchemaSensing(enabled=True), stream).drift.columns["code"]

    assert column.examples == [f"{n}" * 100 for n in range(5)]
    assert (column.expected, column.observed) == ("character varying(3)", ["string"])
    assert column.last_us == {"value_out_of_range": row()["ts_us"]}


def test_another_version_starts_over() -> None:
    """The drift of a column is discarded when its declared type changes."""
    new = (declared("id", "integer", nullable=False), declared("code", "text", nullable=True))
    table = TableSense(SchemaSensing(enabled=True))
    versions = {**VERSIONS[TABLE], "sha256:2": new}
    for version in (VERSION, "sha256:2"):
        frame = batch([row(after=dumps({"id": None, "code": "long"}), schema_version=version)])
        table.accept(frame, pa.array([0]).to_numpy(), versions)

    assert {name: one.counts for name, one in table.drift.columns.items()} == {
        "id": {"unexpected_null": 2}
    }
    assert (table.drift.analyzed, table.drift.compared) == (2, 1)


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({"schema_version": None}, {TABLE}),
        ({"table": "renamed"}, {"public.renamed"}),
        ({"headers": '{"df-source-kind":"outbox"}'}, {TABLE}),
    ],
)
def test_documents_of_their_own(changed: dict[str, Any], known: set[str]) -> None:
    """A row that does not belong to a registered table is a document, and is not compared."""
    tables = SensedTables(SchemaSensing(enabled=True), VERSIONS, {})
    tables.accept(batch([row(after='{"any":{"thing":1}}', **changed)]).select(list(COLUMNS)))

    (learned,) = tables.learned()
    found = restored(SchemaSensing(enabled=True), learned.state)
    assert {learned.table} == known
    assert found.whole is not None
    assert [*found.whole.fields] == [(), (".any",), (".any", ".thing")]
    assert found.drift.analyzed == 0


def test_unknown_versions_are_passed_over() -> None:
    """Rows of a table version that is not registered are not inspected."""
    table = taken(SchemaSensing(enabled=True), [row(schema_version="sha256:dead", after="{}")])

    assert (table.events, table.drift.analyzed, table.whole) == (1, 0, None)


def test_selected_tables_and_columns() -> None:
    """Tables and columns are selected by name; `exclude` takes precedence; deletes are not documents."""
    options = SchemaSensing.model_validate(
        {
            "enabled": True,
            "tables": {"include": ("ord*",), "exclude": ("orders_old",)},
            "deep_inspect": {"columns": {"exclude": ("no%",)}},
        }
    )
    image = dumps({"id": 1, "doc": {"a": 1}, "note": '{"a":1}'})
    frame = batch(
        [
            row(after=image),
            row(after=None, op="d"),
            row(table="orders_old", after=image),
            row(table="customers", after=image),
        ]
    )
    tables = SensedTables(options, VERSIONS, {})
    tables.accept(frame.select(list(COLUMNS)))

    (learned,) = tables.learned()
    found = restored(options, learned.state)
    assert (learned.table, learned.counts["events"], [*found.columns]) == (TABLE, 1, ["doc"])
    assert learned.facts == {
        f"sensing/{TABLE}:doc": f"1 {found.columns['doc'].fingerprint}",
        f"drift/{TABLE}": 0,
    }


def test_states_are_compressed_json() -> None:
    """The stored state is readable JSON, and contains no row values except examples."""
    options = SchemaSensing(enabled=True, tracking={"enum_detection": False})  # type: ignore[arg-type]
    tables = SensedTables(options, VERSIONS, {})
    tables.accept(batch([row(after='{"id":1,"doc":{"k":"secret"}}')]).select(list(COLUMNS)))

    (learned,) = tables.learned()
    text = zlib.decompress(learned.state)
    assert orjson.loads(text)["events"] == 1
    assert b"secret" not in text
