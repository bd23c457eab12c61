"""Destinations and keys, compared with a plain Python reference."""

from __future__ import annotations

import itertools
import json
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.processors.messages import routing
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.chance import examples
from tests.processors.rows import Row, batch, dumps, event, images, position_fields, row, rows

ORIGIN = EventOrigin("postgresql", "orders-db", "acme", position_fields("postgresql"))


def resolved(row: Row, path: str) -> str | None:
    """Return a variable's text by walking through the event and the row's key."""
    place: Any = event(row, ORIGIN)
    place["key"] = None if row["key"] is None else json.loads(row["key"])
    for name in path.split("."):
        place = place.get(name) if isinstance(place, dict) else None
    if place is None or isinstance(place, str):
        return place
    return dumps(place)


PATHS = [
    "op", "ts_ms", "tenant_id", "event_id", "transaction.id", "tx_end", "schema_sequence",
    "source.db", "source.schema", "source.table", "source.name", "source.connector",
    "source.version", "source.ts_ms", "source.lsn", "source.txId", "source.snapshot",
    "source.gtid", "after.orders", "before.orders", "after.naïve 名 😀", "after.orders.orders",
    "after", "before", "ddl.sql", "tags", "synthetic", "key", "key.orders", "nonsense",
    "source.nonsense",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@given(st.lists(rows, min_size=1, max_size=30))
@settings(max_examples=examples(20))
def test_variables_equal_the_reference(path: str, given_rows: list[Row]) -> None:
    """Every kind of path gives the text of the event's value, or null and the path's name."""
    given_rows = [{**one, "topic": None} for one in given_rows]
    template = compile_template(f"${{{path}}}")

    found = routing.destination(template, ORIGIN, batch(given_rows))
    missing = routing.unresolved(template, ORIGIN, batch(given_rows))

    found.validate(full=True)
    expected = [resolved(one, path) for one in given_rows]
    assert found.to_pylist() == expected
    assert missing.to_pylist() == [path if one is None else None for one in expected]


keyed_rows = st.tuples(rows, st.none() | images.map(dumps)).map(
    lambda one: {**one[0], "key": one[1]}
)
literals = st.text("ab.:-${é", max_size=4).filter(lambda text: "${" not in text)


@given(
    st.lists(keyed_rows, min_size=1, max_size=20),
    st.lists(st.tuples(literals, st.sampled_from(PATHS)), max_size=4),
    literals,
)
def test_templates_equal_the_reference(
    given_rows: list[Row], parts: list[tuple[str, str]], last: str
) -> None:
    """Any template is strict as a destination, lenient as a key, and overridden by a processor's value."""
    written = "".join(f"{literal}${{{path}}}" for literal, path in parts) + last
    template = compile_template(written)
    frame = batch(given_rows)

    places = routing.destination(template, ORIGIN, frame).to_pylist()
    blamed = routing.unresolved(template, ORIGIN, frame).to_pylist()
    keys = routing.message_key(template, ORIGIN, frame).to_pylist()
    empty = routing.empty_variables(template, ORIGIN, frame).to_pylist()

    for number, one in enumerate(given_rows):
        values = {path: resolved(one, path) for _, path in parts}
        missing = [path for _, path in parts if values[path] is None]
        made = "".join(literal + (values[path] or "") for literal, path in parts) + last
        assert places[number] == (one["topic"] or (None if missing else made))
        assert blamed[number] == (missing[0] if missing else None)
        key_set = one["route_key"] is not None
        assert keys[number] == (one["route_key"] if key_set else made)
        found = (empty[number] or "").splitlines()
        assert found == ([] if key_set else missing)


def test_destination() -> None:
    """A processor's value takes precedence over the template; an empty one is ignored."""
    template = compile_template("df:${source.schema}.${source.table}:${after.id}")
    given_rows = [
        row(),
        row(topic="audit"),
        row(topic=""),
        row(after='{"id":null}'),
        row(after=None, topic="audit"),
        row(schema=None),
    ]

    found = routing.destination(template, ORIGIN, batch(given_rows)).to_pylist()
    missing = routing.unresolved(template, ORIGIN, batch(given_rows)).to_pylist()

    plain = "df:public.orders:1"
    assert found == [plain, "audit", plain, None, "audit", None]
    assert missing == [None, None, None, "after.id", "after.id", "source.schema"]


def test_destination_that_always_resolves() -> None:
    """A template whose variables every event has needs no check for unresolved ones."""
    template = compile_template("${tenant_id}.${source.db}.${source.table}.${op}")

    assert not routing.can_be_unresolved(template)
    assert routing.can_be_unresolved(compile_template("${source.db}.${source.schema}"))


def test_key() -> None:
    """A processor's value takes precedence over the template, in which unresolved variables are empty."""
    template = compile_template("${after.id}/${before.id}")
    given_rows = [row(), row(route_key="k"), row(after=None, before='{"id":"q\\"7"}')]

    found = routing.message_key(template, ORIGIN, batch(given_rows))

    assert found.to_pylist() == ["1/", "k", '/q"7']


def test_default_key() -> None:
    """Without a template the key is the event id, unless a processor set one."""
    given_rows = [row(), row(route_key="k")]

    found = routing.message_key(None, ORIGIN, batch(given_rows))

    assert found.to_pylist() == [row()["event_id"], "k"]


def test_row_key() -> None:
    """The key is the primary key, or the event id for a table without one; processors may override both."""
    given_rows = [row(), row(key=None), row(route_key="k")]

    found = routing.row_key(batch(given_rows))

    assert found.to_pylist() == ['{"id":1}', row()["event_id"], "k"]


def test_idempotency_key() -> None:
    """The key has tenant, table, transaction and event id; a missing transaction is empty."""
    given_rows = [row(), row(tx_id=None)]

    found = routing.idempotency_key(ORIGIN, batch(given_rows)).to_pylist()

    event_id = row()["event_id"]
    assert found == [f"acme|shop.orders|731|{event_id}", f"acme|shop.orders||{event_id}"]


def test_column_names_of_any_kind() -> None:
    """Blanks, brackets, quotes and stars in names of columns have no special meaning."""
    fields = ["with blank", "a[0]", 'quo"ted', "$", "@x", "0", "it's[0]", "*"]
    image = json.dumps({name: name.upper() for name in fields})
    template = compile_template("|".join(f"${{after.{name}}}" for name in fields))

    found = routing.destination(template, ORIGIN, batch([row(after=image)]))

    assert found.to_pylist() == ["|".join(name.upper() for name in fields)]


def test_numbers_keep_their_form() -> None:
    """A number in a key has the same text as in the event."""
    template = compile_template("${after.n}/${after.o}")
    given_rows = [row(after='{"n":1.10,"o":{"a":12345678901234567890123,"b":1e3}}')]

    found = routing.message_key(template, ORIGIN, batch(given_rows))

    assert found.to_pylist() == ['1.10/{"a":12345678901234567890123,"b":1e3}']


@given(st.lists(keyed_rows, min_size=1, max_size=20), st.sampled_from(PATHS))
def test_urls_equal_the_reference(given_rows: list[Row], path: str) -> None:
    """Nothing of a value is a part of the URL by itself; a URL that a processor set stays as it is."""
    template = compile_template(f"https://h/${{{path}}}?x=${{op}}")

    found = routing.url(template, ORIGIN, batch(given_rows)).to_pylist()

    for url, one in zip(found, given_rows, strict=True):
        value, op = resolved(one, path), resolved(one, "op")
        if one["topic"]:
            assert url == one["topic"]
        elif value is None:
            assert url is None
        else:
            assert url is not None
            assert url.isascii()
            parts = urlsplit(url)
            assert (unquote(parts.path[1:]), parts.query) == (value, f"x={op}")


@given(st.lists(keyed_rows, min_size=1, max_size=20), st.sampled_from(PATHS))
def test_headers_equal_the_reference(given_rows: list[Row], path: str) -> None:
    """Those of templates come before those of the change, which count if both have one."""
    given_rows = [{**one, "headers": own} for one, own in zip(given_rows, itertools.cycle([None, '{"b":"own"}']))]  # fmt: skip
    templates = {"a": compile_template(f"<${{{path}}}>"), "b": compile_template("${op}")}

    found = routing.headers(templates, ORIGIN, batch(given_rows)).to_pylist()

    for text, one in zip(found, given_rows, strict=True):
        own = "own" if one["headers"] else resolved(one, "op")
        assert text is not None
        assert json.loads(text) == {"a": f"<{resolved(one, path) or ''}>", "b": own}
