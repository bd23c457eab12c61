"""Events in Avro: any change of any table, read back with fastavro, says what its JSON event and its typed rows say."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Context, Decimal
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.engine import Engine, ValueOptions
from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.processors.messages.avro.envelope import AvroEnvelope
from deltaforge_dagster.processors.messages.avro.schema import OTHER_FIELDS, AvroTable, AvroTables
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.cells import REASONS
from deltaforge_dagster.typed_rows.rows import typed_rows
from deltaforge_dagster.typed_rows.tables import VersionName
from tests.avro import read, read_plain
from tests.chance import examples
from tests.processors.rows import Row, batch, row
from tests.sources.mysql import reference as mysql_reference
from tests.sources.mysql import strategies as mysql
from tests.sources.mysql.decode import test_decoder as mysql_decoder
from tests.sources.postgres import reference as postgres_reference
from tests.sources.postgres.decode import test_decoder as postgres_decoder
from tests.strategies import streams as postgres_streams

_OPTIONS = st.builds(
    AvroEncoding,
    type=st.just("avro"),
    schema_registry_url=st.just("http://registry"),
    unsigned_bigint_mode=st.sampled_from(["string", "long"]),
    enum_mode=st.sampled_from(["string", "enum"]),
    naive_timestamp_mode=st.sampled_from(["string", "timestamp"]),
)
_PLAIN = AvroEncoding(type="avro", schema_registry_url="http://registry")


_VERSION = ("db", "schema", "table", "schema_version")


class Maker:
    """The schemas and messages of a pipeline's tables."""

    def __init__(
        self,
        kind: str,
        tables: Mapping[str, TableSchema],
        encoding: AvroEncoding = _PLAIN,
        *,
        values: ValueOptions | None = None,
        other_fields: bool = False,
    ) -> None:
        source = source_types()[kind]
        fields = source.position_fields(SimpleNamespace(id="orders-db"))
        self.origin = EventOrigin(source.connector, "orders-db", "acme", fields)
        engine = Engine(values=values or ValueOptions())
        made = AvroTables(encoding, self.origin, source, engine, other_fields=other_fields)
        names = [VersionName(one.db, one.schema, one.table, name) for name, one in tables.items()]
        versions = dict(zip(names, tables.values(), strict=True))
        self.tables = (made.of_no_table, *(made.of(*one) for one in versions.items()))
        self.make = AvroEnvelope(
            self.origin, self.tables, {name: n for n, name in enumerate(versions, 1)}
        )

    def messages(self, frame: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return the messages of a change frame: value, schema and unfit."""
        return cast("list[dict[str, Any]]", cast("pa.Array[Any]", self.make(frame)).to_pylist())

    def events(self, *rows: Row) -> list[dict[str, Any]]:
        """Return the events of rows, each of which must be fit."""
        found = self.messages(batch(rows))
        assert [one["unfit"] for one in found] == [None] * len(rows)
        return [read(self.tables[one["schema"]].text, one["value"]) for one in found]


def frame_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return captured rows with the columns that a processor would fill."""
    return rows.append_column("synthetic", pa.nulls(rows.num_rows, pa.dictionary(pa.int32(), pa.string())))  # fmt: skip


def check(batches: Iterable[ChangeBatch], maker: Maker) -> None:
    """Compare the messages of decoded changes with their JSON events and with typed rows."""
    for one in batches:
        if one.rows is None:
            continue
        frame = frame_of(one.rows)
        events = [
            json.loads(text or "") for text in native_envelope(maker.origin, frame).to_pylist()
        ]
        changes = frame.to_pylist()
        tables = [
            maker.tables[
                maker.make.numbers.get(VersionName(*(change[name] for name in _VERSION)), 0)
            ]
            for change in changes
        ]
        rows = {
            name: expected_rows([change[name] for change in changes], tables)
            for name in ("before", "after")
        }
        for number, message in enumerate(maker.messages(frame)):
            change, event, table = changes[number], events[number], tables[number]
            images = {name: found[number] for name, found in rows.items()}
            if any(isinstance(image, str) for image in images.values()):
                assert message["value"] is message["schema"] is None
                assert any(reason in message["unfit"] for reason in REASONS.values())
                continue
            found = read_plain(maker.tables[message["schema"]].text, message["value"])
            missing = {name: found.pop(f"{name}_missing") for name in images}
            assert {name: found.pop(name) for name in images} == images
            assert missing == {name: lacking(change[name], table) for name in images}
            assert said(found) == {k: v for k, v in event.items() if k not in images}


def said(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a message says beside its rows, in the form of the JSON event."""
    source = {**found["source"], **(found["source"]["position"] or {})}
    del source["position"]
    whole = {**found, "source": {k: v for k, v in source.items() if v is not None}}
    for name in ("ddl", "tags"):
        if whole[name] is not None:
            whole[name] = json.loads(whole[name])
    return {name: value for name, value in whole.items() if value is not None}


def expected_rows(
    images: list[str | None], tables: list[AvroTable]
) -> list[dict[str, Any] | str | None]:
    """Return rows as their types say that they are, or why they do not fit."""
    found: list[dict[str, Any] | str | None] = [None] * len(images)
    for table in {one.text: one for one in tables}.values():
        places = [
            n for n, one in enumerate(tables) if one.text == table.text and images[n] is not None
        ]
        some = [images[n] for n in places]
        if table.rows is None:
            rows: list[dict[str, Any] | str] = [{OTHER_FIELDS: image} for image in some]
        else:
            rows = typed(pa.array(some, pa.string()), table)
        for place, row_of in zip(places, rows, strict=True):
            found[place] = row_of
    return found


def typed(images: pa.StringArray, table: AvroTable) -> list[dict[str, Any] | str]:
    """Return rows with types, or why they do not fit."""
    assert table.rows is not None
    made = typed_rows(images, table.rows)
    found: list[dict[str, Any] | str] = [{} for _ in range(len(images))]
    misfits = {one.row: one.reason for one in reversed(made.misfits)}
    for number, column in enumerate(table.columns):
        for row_number, value in enumerate(plain(made.batch.column(number))):
            if column.symbols and value is not None and value not in column.symbols:
                misfits.setdefault(row_number, "it is not one of the enum's labels")
            cells = found[row_number]
            assert isinstance(cells, dict)
            cells[column.field] = value
    for row_number, reason in misfits.items():
        found[row_number] = reason
    return found


def plain(column: pa.Array[Any]) -> list[Any]:
    """Return the values of a column, as the types that carry them in Avro."""
    type_ = column.type
    if pa.types.is_list(type_):
        lists = cast("pa.ListArray[Any]", column)
        elements, ends = plain(lists.values), lists.offsets.to_pylist()
        return [
            elements[ends[n] : ends[n + 1]] if valid else None
            for n, valid in enumerate(column.is_valid().to_pylist())
        ]
    if pa.types.is_temporal(type_):
        number = pa.int32() if pa.types.is_date(type_) else pa.int64()
        return list(column.cast(number).to_pylist())
    if pa.types.is_decimal(type_):
        scale = type_.scale
        return [None if one is None else unscaled(one, scale) for one in column.to_pylist()]
    values = column.to_pylist()
    if pa.types.is_floating(type_):
        return [Same(one) if one is not None and math.isnan(one) else one for one in values]
    return [str(one) if isinstance(one, uuid.UUID) else one for one in values]


def unscaled(value: Decimal, scale: int) -> bytes:
    """Return the bytes of a decimal: as few as its sign needs, the most significant first."""
    number = int(value.scaleb(scale, Context(prec=80)))
    size = 1
    while not -(1 << 8 * size - 1) <= number < 1 << 8 * size - 1:
        size += 1
    return number.to_bytes(size, "big", signed=True)


class Same(float):
    """A NaN that is equal to another one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isnan(other)

    __hash__ = None  # type: ignore[assignment]


def lacking(image: str | None, table: AvroTable) -> list[str] | None:
    """Return the fields that an image lacks, None if there are none."""
    if image is None or table.rows is None:
        return None
    fields = {
        name
        for name, value in json.loads(image).items()
        if not (table.rows.marks_unchanged and value == {"_unchanged": True})
    }
    return [one.field for one in table.columns if one.name not in fields] or None


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(40))
@given(postgres_streams(), _OPTIONS)
def test_changes_of_postgresql(stream: bytes, encoding: AvroEncoding) -> None:
    """Any stream, with unchanged and absent values, truncates and logical messages, and any options."""
    registry = postgres_reference.Registry()
    batches, error = postgres_decoder.decode(stream, registry=registry)
    assert error is None
    check(batches, Maker("postgres", versions(registry.registered), encoding))


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(40))
@given(mysql.streams(), _OPTIONS)
def test_changes_of_mysql(made: mysql.Made, encoding: AvroEncoding) -> None:
    """Any log, with all columns or some, schema changes, and any options."""
    registry = mysql_reference.Registry()
    batches, error = mysql_decoder.decode(
        made.stream, registry=registry, captures=lambda db, _table: db == "shop"
    )
    assert error is None
    check(batches, Maker("mysql", versions(registry.registered), encoding))


def versions(registered: Iterable[tuple[TableSchema, Any]]) -> dict[str, TableSchema]:
    """Return table versions by the fingerprints that the registries of the references give them."""
    found = dict.fromkeys(table for table, _ in registered)
    return {f"sha256:{n}": table for n, table in enumerate(found, 1)}


def table(
    *columns: tuple[str, str], name: str = "orders", schema: str | None = None
) -> TableSchema:
    """Return a version of a table of the database `shop`."""
    return TableSchema(
        "shop",
        schema,
        name,
        tuple(Column(name, type_, None, True, n) for n, (name, type_) in enumerate(columns, 1)),
        (),
    )


def change(after: object, version: str | None = "sha256:1", **changed: Any) -> Row:
    """Return an insert into `orders`."""
    return row(schema=None, schema_version=version, after=json.dumps(after), **changed)


def test_logical_types() -> None:
    """Values of logical types arrive as such, exactly."""
    columns = {
        "price": ("decimal(10,2)", "-12.50", Decimal("-12.50")),
        "large": ("decimal(38,0)", "9" * 38, Decimal("9" * 38)),
        "day": ("date", "1969-12-31", date(1969, 12, 31)),
        "clock": ("time(6)", "01:02:03.000004", time(1, 2, 3, 4)),
        "moment": ("timestamp(6)", "2026-03-01T12:00:00.000001Z", datetime(2026, 3, 1, 12, 0, 0, 1, UTC)),
        "naive": ("datetime(6)", "2026-03-01 12:00:00.000001", datetime(2026, 3, 1, 12, 0, 0, 1, UTC)),
        "id": ("uuid", "0192f0c1-0000-7000-8000-00000000000a", uuid.UUID("0192f0c1-0000-7000-8000-00000000000a")),
        "state": ("enum('new','paid')", "paid", "paid"),
        "odd": ("enum('new','to pay')", "to pay", "to pay"),
        "count": ("bigint unsigned", 2**63 - 1, 2**63 - 1),
        "data": ("blob", {"_base64": "AAH/"}, b"\x00\x01\xff"),
        "document": ("json", {"a": [1.50]}, '{"a": [1.5]}'),
        "vector": ("vector", [1.5, None], [1.5, None]),
    }  # fmt: skip
    encoding = AvroEncoding(
        type="avro",
        schema_registry_url="http://registry",
        unsigned_bigint_mode="long",
        enum_mode="enum",
        naive_timestamp_mode="timestamp",
    )
    maker = Maker(
        "mysql", {"sha256:1": table(*((n, t) for n, (t, *_) in columns.items()))}, encoding
    )

    (found,) = maker.events(change({name: written for name, (_, written, _) in columns.items()}))

    assert found["after"] == {name: value for name, (*_, value) in columns.items()}


def test_text_instead() -> None:
    """Without options, what has no type that is safe everywhere is text, as in JSON."""
    maker = Maker(
        "mysql",
        {"sha256:1": table(("id", "bigint unsigned"), ("at", "datetime"), ("s", "enum('a')"))},
    )
    after = {"id": 2**64 - 1, "at": "0000-00-00 00:00:00", "s": "a"}

    (found,) = maker.events(change(after))

    assert found["after"] == {**after, "id": str(2**64 - 1)}


@pytest.mark.parametrize(
    ("type_", "value"),
    [("date", "0000-00-00"), ("time", "838:59:59"), ("bigint unsigned", 2**63), ("enum('a')", "")],
)
def test_what_does_not_fit(type_: str, value: object) -> None:
    """A value outside of its type makes its change undeliverable, and no other one; the reason names no value."""
    encoding = AvroEncoding(
        type="avro",
        schema_registry_url="http://r",
        unsigned_bigint_mode="long",
        enum_mode="enum",
    )
    maker = Maker("mysql", {"sha256:1": table(("n", "int"), ("c", type_))}, encoding)
    rows = [change({"n": 1, "c": None}), change({"n": 2, "c": value}), change({"n": 3, "c": None})]

    first, second, third = maker.messages(batch(rows))

    assert (second["value"], second["schema"]) == (None, None)
    assert second["unfit"].startswith("its column 'c' does not fit: it is ")
    assert str(value) not in second["unfit"] or not str(value)
    for number, one in ((1, first), (3, third)):
        assert read(maker.tables[1].text, one["value"])["after"] == {"n": number, "c": None}


def test_names_that_avro_does_not_allow() -> None:
    """Other characters become `_`; a field never takes the name of another column."""
    columns = ("first name", "first_name", "first-name", "1st", "größe")
    maker = Maker("mysql", {"sha256:1": table(*((one, "int") for one in columns), name="my table")})
    after = {name: number for number, name in enumerate(columns)}

    (found,) = maker.events(change(after, table="my table"))

    assert found["after"] == {"first_name_2": 0, "first_name": 1, "first_name_3": 2, "_1st": 3, "gr__e": 4}  # fmt: skip
    assert maker.tables[1].record == "deltaforge.cdc.mysql.shop.my_table.Envelope"
    assert '"column":"first name"' in maker.tables[1].text


def test_several_tables_and_versions() -> None:
    """Rows of several table versions, and of none, keep their order and have their own schemas."""
    first, second = table(("id", "int")), table(("id", "int"), ("more", "text"))
    other = table(("name", "text"), name="people")
    maker = Maker("mysql", {"sha256:1": first, "sha256:2": second, "sha256:3": other})

    found = maker.messages(
        batch(
            [
                change({"id": 1}),
                change({"name": "x"}, "sha256:3", table="people"),
                change({"id": 2, "more": "y"}, "sha256:2"),
                change({"any": [1.0]}, None),
                change({"id": 3}),
                row(op="ddl", table="_ddl", schema=None, after=None, schema_version=None, ddl='{"sql":"x"}'),
            ]
        )
    )  # fmt: skip

    assert [one["schema"] for one in found] == [1, 3, 2, 0, 1, 0]
    events = [read(maker.tables[one["schema"]].text, one["value"]) for one in found]
    assert [one["after"] for one in events] == [
        {"id": 1}, {"name": "x"}, {"id": 2, "more": "y"}, {OTHER_FIELDS: '{"any": [1.0]}'}, {"id": 3}, None,
    ]  # fmt: skip
    assert (events[-1]["op"], events[-1]["ddl"]) == ("r", '{"sql":"x"}')
    assert maker.tables[0].record == "deltaforge.cdc.mysql.Envelope"


def test_fields_that_processors_add_and_remove() -> None:
    """What a table does not have is text in a field of its own; what a row lacks is named."""
    tables = {"sha256:1": table(("id", "int"), ("a", "text"))}
    after = {"id": 1, "x": [1, 2.0], "ü": "é"}

    (kept,) = Maker("mysql", tables, other_fields=True).events(change(after))
    (refused,) = Maker("mysql", tables).messages(batch([change(after)]))

    assert kept["after"] == {"id": 1, "a": None, OTHER_FIELDS: json.dumps({"x": [1, 2.0], "ü": "é"}).replace(', "', ',"').replace('": ', '":')}  # fmt: skip
    assert kept["after_missing"] == ["a"]
    assert refused["unfit"] == "its row has a field that its table does not have"


def test_a_raw_payload_is_no_avro() -> None:
    """What a processor marked as raw is its `after` image; it has no schema."""
    maker = Maker("mysql", {"sha256:1": table(("id", "int"))})
    rows = [
        change({"id": 1}),
        change("text", raw_payload=True),
        change({"a": 1}, raw_payload=True),
    ]

    plain_one, *raw = maker.messages(batch(rows))

    assert plain_one["schema"] == 1
    assert raw == [
        {"value": b"text", "schema": None, "unfit": None},
        {"value": b'{"a": 1}', "schema": None, "unfit": None},
    ]


def test_a_snapshot_has_no_position() -> None:
    """Rows of a snapshot among streamed ones have no position, and say what they are."""
    maker = Maker("mysql", {"sha256:1": table(("id", "int"))})
    places: dict[str, Any] = {"file": "bin.1", "pos": 7, "tx_id": "u:1"}

    streamed, read_row, again = maker.events(
        change({"id": 1}, **places), change({"id": 2}, op="r"), change({"id": 3}, **places)
    )

    assert streamed["source"]["position"].items() >= {"file": "bin.1", "pos": 7, "gtid": "u:1"}.items()  # fmt: skip
    assert again["source"]["position"] == streamed["source"]["position"]
    assert (read_row["source"]["position"], read_row["source"]["snapshot"]) == (None, "true")


def test_every_schema_is_compatible_with_the_one_before() -> None:
    """Columns can be added, removed and made nullable without another name of the record, and enums can grow."""
    from deltaforge_lab.servers.avro_compatibility import problems  # noqa: PLC0415

    encoding = AvroEncoding(type="avro", schema_registry_url="http://r", enum_mode="enum")
    tables = [
        table(("id", "int"), ("e", "enum('a')")),
        table(("id", "bigint"), ("e", "enum('a','b')"), ("more", "decimal(4,1)")),
        table(("id", "bigint"), ("e", "enum('a','b')")),
    ]
    maker = Maker("mysql", {f"sha256:{n}": one for n, one in enumerate(tables)}, encoding)
    first, second, third = (json.loads(one.text) for one in maker.tables[1:])

    assert problems(second, first) == []
    assert problems(third, second) == []
    assert problems(json.loads(maker.tables[0].text), third) == []
    assert problems(first, second) != []  # a long is no int


def test_nothing_is_lost_between_blocks() -> None:
    """More rows than are written at once, of two versions in turn, arrive in order."""
    tables = {"sha256:1": table(("id", "int")), "sha256:2": table(("id", "bigint"))}
    maker = Maker("mysql", tables)
    rows = [change({"id": n}, f"sha256:{n % 2 + 1}") for n in range(3000)]

    found = maker.events(*rows)

    assert [one["after"]["id"] for one in found] == [*range(3000)]


def test_the_empty_frame() -> None:
    """No rows are no messages."""
    maker = Maker("mysql", {})
    assert maker.messages(batch([row()]).slice(0, 0)) == []
