"""Which events pass a filter."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from deltaforge_dagster.config.processors import FilterProcessor
from deltaforge_dagster.processors.filter import Filter
from tests.processors.rows import Row, batch, row


def made(**options: Any) -> Filter:
    """Return a filter with these options, given as in a pipeline file."""
    return Filter(FilterProcessor.model_validate_json(json.dumps({"type": "filter", **options})))


def passing(rows: list[Row], **options: Any) -> list[int]:
    """Return the numbers of the rows that pass."""
    numbered = [{**one, "ordinal": number} for number, one in enumerate(rows)]
    kept = made(**options).process(batch(numbered)).column("ordinal")
    return cast("list[int]", kept.to_pylist())


def test_no_gate_lets_everything_pass() -> None:
    """A filter without options passes everything."""
    assert passing([row(op=one) for one in ("c", "u", "d", "r", "t", "ddl")]) == [0, 1, 2, 3, 4, 5]


def test_ops() -> None:
    """Operations have the names used in the file; a DDL event is none of them."""
    rows = [row(op=one) for one in ("c", "u", "d", "r", "t", "ddl")]

    assert passing(rows, ops=["create", "read"]) == [0, 3]
    assert passing(rows, ops=["update", "delete", "truncate"]) == [1, 2, 4]


def test_tables() -> None:
    """A table is named by its schema or its database, patterns may have wildcards, `exclude` takes precedence."""
    rows = [
        row(schema="public", table="orders"),
        row(schema="public", table="order_items"),
        row(schema="audit", table="orders"),
        row(schema=None, table="users"),
    ]

    assert passing(rows, tables={"include": ["public.*"]}) == [0, 1]
    assert passing(rows, tables={"include": ["*.orders"]}) == [0, 2]
    assert passing(rows, tables={"include": ["shop.%"]}) == [0, 1, 2, 3]
    assert passing(rows, tables={"exclude": ["audit.*", "shop.users"]}) == [0, 1]
    assert passing(rows, tables={"include": ["*.orders"], "exclude": ["audit.*"]}) == [0]


AFTER = {
    "n": 42, "f": 1.5, "s": "paid", "flag": True, "none": None,
    "list": ["a", 1], "deep": {"x": {"y": 5}}, "text42": "42",
}  # fmt: skip


@pytest.mark.parametrize(
    ("predicate", "passes"),
    [
        ({"path": "n", "op": "exists"}, True),
        ({"path": "none", "op": "exists"}, False),
        ({"path": "nothing", "op": "not_exists"}, True),
        ({"path": "none", "op": "not_exists"}, True),
        ({"path": "n", "op": "eq", "value": 42.0}, True),
        ({"path": "text42", "op": "eq", "value": 42}, False),
        ({"path": "flag", "op": "eq", "value": True}, True),
        ({"path": "flag", "op": "eq", "value": 1}, False),
        ({"path": "s", "op": "ne", "value": "new"}, True),
        ({"path": "nothing", "op": "ne", "value": "new"}, False),
        ({"path": "nothing", "op": "eq", "value": None}, False),
        ({"path": "n", "op": "gt", "value": 41.9}, True),
        ({"path": "n", "op": "gte", "value": 42}, True),
        ({"path": "n", "op": "lt", "value": 42}, False),
        ({"path": "f", "op": "lte", "value": 1.5}, True),
        ({"path": "s", "op": "gt", "value": "open"}, True),
        ({"path": "s", "op": "gt", "value": 1}, False),
        ({"path": "s", "op": "in", "value": ["new", "paid"]}, True),
        ({"path": "n", "op": "in", "value": ["42"]}, False),
        ({"path": "nothing", "op": "in", "value": [None]}, False),
        ({"path": "s", "op": "not_in", "value": ["paid"]}, False),
        ({"path": "nothing", "op": "not_in", "value": ["paid"]}, True),
        ({"path": "s", "op": "contains", "value": "ai"}, True),
        ({"path": "list", "op": "contains", "value": 1}, True),
        ({"path": "list", "op": "contains", "value": "1"}, False),
        ({"path": "n", "op": "contains", "value": "4"}, False),
        ({"path": "s", "op": "regex", "value": "^p.*d$"}, True),
        ({"path": "s", "op": "regex", "value": "ai"}, True),
        ({"path": "n", "op": "regex", "value": "42"}, False),
        ({"path": "deep.x.y", "op": "eq", "value": 5}, True),
        ({"path": "deep.x.z", "op": "exists"}, False),
        ({"path": "list.0", "op": "exists"}, False),
    ],
)
def test_predicates(predicate: dict[str, Any], passes: bool) -> None:
    """Each comparison follows its rule for values of every kind, including missing ones."""
    assert passing([row(after=json.dumps(AFTER))], fields=[predicate]) == ([0] if passes else [])


def test_changed() -> None:
    """A field has changed if its values differ or one is missing; an event that lacks an image passes."""
    rows = [
        row(op="u", before='{"a":1}', after='{"a":1.0}'),
        row(op="u", before='{"a":1}', after='{"a":2}'),
        row(op="u", before="{}", after='{"a":2}'),
        row(op="u", before="{}", after='{"a":null}'),
        row(op="c", before=None, after='{"a":1}'),
        row(op="d", before='{"a":1}', after=None),
    ]

    assert passing(rows, fields=[{"path": "a", "op": "changed"}]) == [1, 2, 4, 5]


def test_an_event_without_after() -> None:
    """A delete passes only those comparisons that a missing value passes."""
    rows = [row(op="d", after=None)]

    for predicate, passes in (
        ({"op": "ne", "value": 1}, False),
        ({"op": "exists"}, False),
        ({"op": "not_exists"}, True),
        ({"op": "not_in", "value": [1]}, True),
    ):
        assert passing(rows, fields=[{"path": "a", **predicate}]) == ([0] if passes else [])


def test_match() -> None:
    """`all` requires all conditions to hold, `any` one of them."""
    rows = [row(after='{"a":1,"b":2}'), row(after='{"a":1,"b":3}'), row(after='{"a":9,"b":9}')]
    fields = [{"path": "a", "op": "eq", "value": 1}, {"path": "b", "op": "eq", "value": 2}]

    assert passing(rows, fields=fields) == [0]
    assert passing(rows, fields=fields, match="any") == [0, 1]


def test_drops_are_counted() -> None:
    """The number of dropped events is counted over all batches."""
    one = made(ops=["create"])
    rows = batch([row(op="c"), row(op="u"), row(op="d")])

    one.process(rows)
    one.process(rows)

    assert one.counts == {"filter_dropped": 4}


@pytest.mark.parametrize(
    "predicate",
    [
        {"path": "a", "op": "regex", "value": "("},
        {"path": "a", "op": "regex", "value": 1},
        {"path": "a", "op": "in", "value": "x"},
        {"path": "a", "op": "eq"},
        {"path": "a", "op": "like", "value": "x"},
    ],
)
def test_a_wrong_predicate_is_found_in_the_file(predicate: dict[str, Any]) -> None:
    """An invalid pattern, a missing value and an unknown comparison are problems of the file."""
    with pytest.raises(ValueError, match=r"regex|value|regular|Input should be"):
        made(fields=[predicate])
