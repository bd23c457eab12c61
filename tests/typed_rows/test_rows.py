from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.value_types import INT64, JSON, TEXT, ValueType, list_of
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_dagster.typed_rows.tables import Misfit, TypedRows, typed_rows
from tests.typed_rows.forms import agree

NAMES = ("id", 'o"d\\d', "größe", "id2", "")
UNCHANGED = '{"_unchanged":true}'


def schema(*names: str, type_: ValueType = INT64, marks_unchanged: bool = False) -> TypedSchema:
    """Return a schema with columns of one type."""
    columns = tuple(TypedColumn(name, type_) for name in names)
    return TypedSchema(columns, marks_unchanged)


def typed(*images: str | None, columns: TypedSchema) -> TypedRows:
    """Return the rows of images."""
    rows = typed_rows(pa.array(images, pa.string()), columns)
    rows.batch.validate(full=True)
    return rows


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(_texts, below, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.none() | st.dictionaries(st.sampled_from(NAMES) | _texts, _documents), max_size=6),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.integers(0, 2),
)
def test_members_are_found_in_any_order(
    images: list[dict[str, Any] | None],
    ascii_: bool,
    indent: int | None,
    skipped: int,
) -> None:
    """Members in another order, with white space or escapes in their names, are found, and fields that are no columns too."""
    separators = None if indent else (",", ":")
    written = [
        None
        if one is None
        else json.dumps(one, ensure_ascii=ascii_, indent=indent, separators=separators)
        for one in images
    ]
    array = pa.array(["{}"] * skipped + written, pa.string())[skipped:]

    rows = typed_rows(array, schema(*NAMES, type_=JSON))

    names = {name for one in images if one for name in one}
    assert [column.name for column in rows.schema.columns] == [*NAMES, *sorted(names - {*NAMES})]
    rows.batch.validate(full=True)
    assert rows.misfits == ()
    for number, column in enumerate(rows.schema.columns):
        there = [one is not None and column.name in one for one in images]
        assert rows.present.get(column.name, pa.array([True] * len(images))).to_pylist() == there
        for value, image in zip(rows.batch.column(number).to_pylist(), images, strict=True):
            expected = None if image is None else image.get(column.name)
            if column.type is JSON or not isinstance(expected, str):
                assert (None if value is None else json.loads(value)) == expected
            else:
                assert value == expected


def test_absent_null_and_unchanged() -> None:
    """A value that the image lacks is told from null; so is the mark of an unchanged one, where the source has it."""
    images = ('{"id":1,"note":"x"}', '{"id":2,"note":null}', '{"id":3}', None)
    rows = typed(*images, '{"id":4,"note":{"_unchanged":true}}', columns=schema("id", "note", type_=TEXT, marks_unchanged=True))  # fmt: skip
    assert rows.batch.column("note").to_pylist() == ["x", None, None, None, None]
    assert rows.present["note"].to_pylist() == [True, True, False, False, False]
    assert rows.present["id"].to_pylist() == [True, True, True, False, True]

    document = typed(f'{{"id":{UNCHANGED}}}', columns=schema("id", type_=JSON))
    assert document.batch.column("id").to_pylist() == [UNCHANGED]
    assert document.present == {}


def test_complete_rows_have_no_bitmaps() -> None:
    """Where no image lacks anything nothing is said about it."""
    assert typed('{"id":1}', '{"id":null}', columns=schema("id")).present == {}


def test_fields_of_processors_are_text() -> None:
    """Fields that are no columns become text behind them, whatever their values; the schema of the result knows them."""
    images = ('{"id":1,"b":5,"a":[1]}', '{"c":"x","id":2}', '{"id":3,"b":"y"}')
    rows = typed(*images, columns=schema("id"))

    assert [(one.name, one.type) for one in rows.schema.columns] == [("id", INT64), ("a", TEXT), ("b", TEXT), ("c", TEXT)]  # fmt: skip
    assert rows.batch.to_pylist() == [
        {"id": 1, "a": "[1]", "b": "5", "c": None},
        {"id": 2, "a": None, "b": None, "c": "x"},
        {"id": 3, "a": None, "b": "y", "c": None},
    ]
    again = typed('{"id":4}', columns=rows.schema)
    assert again.batch.to_pylist() == [{"id": 4, "a": None, "b": None, "c": None}]
    assert again.present["b"].to_pylist() == [False]


def test_other_fields_are_left_out() -> None:
    """On request only the columns are read: no other field becomes one, and a row without any column is a row."""
    images = pa.array(['{"b":5,"id":1}', '{"b":6}', "7"])
    rows = typed_rows(images, schema("id"), other_fields=False)

    assert rows.batch.to_pylist() == [{"id": 1}, {"id": None}, {"id": None}]
    assert rows.present["id"].to_pylist() == [True, False, False]
    assert [one.row for one in rows.misfits] == [2]


def test_the_first_of_equal_names_counts() -> None:
    """Of several members with one name the first is the value, as wherever images are read."""
    assert typed('{"id":1,"id":2}', columns=schema("id")).batch.to_pylist() == [{"id": 1}]


def test_an_image_that_is_no_row() -> None:
    """A text that is no object is reported as a whole."""
    rows = typed("[1]", "", " ", '{"id":1}', columns=schema("id"))

    assert rows.misfits == tuple(Misfit(row, None, "it is not a JSON object") for row in range(3))
    assert rows.batch.column("id").to_pylist() == [None, None, None, 1]


def test_a_name_that_is_not_unicode() -> None:
    """A field that no column can be named after is reported; fields of other rows are found as before."""
    rows = typed(
        r'{"id":1,"\ud800":2,"b":3}', '{"id":2,"a":4}', r'{"\u0069d":3}', columns=schema("id")
    )

    reason = "a field's name has half of a surrogate pair, which is not a character"
    assert rows.misfits == (Misfit(0, None, reason),)
    assert rows.batch.to_pylist() == [{"id": 1, "a": None}, {"id": 2, "a": "4"}, {"id": 3, "a": None}]  # fmt: skip


def test_a_damaged_image_ends_with_an_error() -> None:
    """Images are valid JSON where they come from; text in which nobody finds the members is damage."""
    with pytest.raises(CorruptLog, match="a row image is not valid JSON"):
        typed('{"a"1}', columns=schema("id"))


def test_misfits_are_in_the_order_of_rows() -> None:
    """Every value that does not fit is named, row by row; the others of its row are there."""
    images = ['{"a":1,"b":"x"}', '{"a":"x","b":2}', '{"a":"x","b":"x"}']
    rows = typed(*images, columns=schema("a", "b"))

    assert [(one.row, one.column) for one in rows.misfits] == [(0, "b"), (1, "a"), (2, "a"), (2, "b")]  # fmt: skip
    assert rows.batch.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}, {"a": None, "b": None}]  # fmt: skip
    agree(list(images), rows)


def test_no_rows_and_no_columns() -> None:
    """Nothing becomes nothing."""
    assert typed(columns=schema("id")).batch.num_rows == 0
    assert typed("{}", columns=schema()).batch.num_columns == 0


@pytest.mark.parametrize("member", ["null\t", " null\t ", "null\t\n"])
def test_a_document_that_is_null_is_a_value(member: str) -> None:
    """Sources write a tab behind it, also in arrays; other white space, and other types, have no such documents."""
    columns = TypedSchema(
        (TypedColumn("a", JSON), TypedColumn("b", list_of(JSON)), TypedColumn("c", TEXT))
    )
    image = f'{{"a":{member},"b":[{member},null],"c":{member}}}'
    rows = typed(image, '{"a":null ,"b":[ null , 1],"c":null}', columns=columns)
    assert rows.batch.to_pylist() == [
        {"a": "null", "b": ["null", None], "c": None},
        {"a": None, "b": [None, "1"], "c": None},
    ]


def test_a_document_that_looks_like_the_mark_is_a_value() -> None:
    """The mark has no white space; sources write this document with some."""
    rows = typed('{"a":{"_unchanged":true }}', '{"a":{"_unchanged":true}}', columns=schema("a", type_=JSON, marks_unchanged=True))  # fmt: skip
    assert rows.batch.column("a").to_pylist() == ['{"_unchanged":true }', None]
    assert rows.present["a"].to_pylist() == [True, False]
