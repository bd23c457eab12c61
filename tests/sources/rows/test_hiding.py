from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog, SourceMisconfigured
from deltaforge_dagster.sources.rows.hiding import HiddenTable, Hiding
from deltaforge_dagster.tables import Column, TableSchema
from tests.sources.hidden import SALT, UNCHANGED, base64_of, hashed, image_of, rules

NAMES = ("id", "i", 'o"d\\d', "größe", "id2", "note", "_unchanged")


def table(names: tuple[str, ...] = NAMES, key: tuple[str, ...] = ("id",)) -> TableSchema:
    """Return the table `shop.users`."""
    columns = (Column(name, "varchar(9)", None, True, n) for n, name in enumerate(names, 1))
    return TableSchema("shop", None, "users", tuple(columns), key)


def shown(image: str, **options: Any) -> str:
    """Return what the image of a row of `shop.users` shows."""
    (text,) = HiddenTable(rules(**options), table()).column(pa.array([image])).to_pylist()
    assert isinstance(text, str)
    return text


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_strings = st.builds(lambda text, ascii_: json.dumps(text, ensure_ascii=ascii_), _texts, st.booleans())  # fmt: skip
_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | _texts,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(_texts, below, max_size=3),
    max_leaves=8,
).map(_compact)
_texts_or_bytes = _strings | st.binary(max_size=9).map(base64_of)
_values = _texts_or_bytes | _documents | st.sampled_from(["null", UNCHANGED, "12.50"])


@st.composite
def images(draw: st.DrawFn) -> dict[str, str]:
    """Return values by column, in the table's order, some left out; `note` is text, or bytes."""
    present = draw(st.sets(st.sampled_from(NAMES)))
    return {
        name: draw(_texts_or_bytes if name == "note" else _values)
        for name in NAMES
        if name in present
    }


def expected(values: dict[str, str], characters: int) -> dict[str, str]:
    """Return what a row shows by the rules of the test below, in plain Python."""
    found = {name: value for name, value in values.items() if name != "i"}
    for name in {"id", 'o"d\\d', "größe", "note"} & found.keys():
        value = found[name]
        if value in {"null", UNCHANGED}:
            continue
        read = json.loads(value)
        if name == "größe":
            found[name] = '"*** \\"hidden\\""'
        elif name != "note":
            found[name] = hashed(value)
        elif isinstance(read, str):
            kept = json.loads(shown_string(value, characters))
            assert kept == read[:characters]
            found[name] = shown_string(value, characters)
        else:
            found[name] = base64_of(base64.b64decode(read["_base64"])[:characters])
    return found


def shown_string(value: str, characters: int) -> str:
    """Return the shortest beginning of a JSON string that has so many characters, closed."""
    whole = json.loads(value)[:characters]
    for end in range(1, len(value)):
        try:
            if json.loads(value[:end] + '"') == whole:
                return value[:end] + '"'
        except ValueError:
            continue
    return value


@given(st.lists(st.none() | images(), min_size=1, max_size=5), st.integers(1, 6))
def test_rows_show_what_the_rules_leave(rows: list[dict[str, str] | None], characters: int) -> None:
    """Hidden values are hidden as plain Python does it, and every other byte stays as it stands."""
    hidden = HiddenTable(
        rules(
            exclude=["shop.users.i"],
            hash=["users.id", 'shop.*.o"d\\d'],
            mask={"*.größe": '*** "hidden"'},
            truncate={"shop.users.not*": characters},
        ),
        table(),
    )
    images_ = [None if row is None else image_of(row) for row in rows]

    column = hidden.column(pa.array(images_, pa.string()))

    column.validate(full=True)
    assert column.to_pylist() == [
        None if row is None else image_of(expected(row, characters)) for row in rows
    ]


@pytest.mark.parametrize(
    ("value", "length", "left"),
    [
        ('"abc"', 3, '"abc"'),
        ('"abcd"', 3, '"abc"'),
        ('""', 1, '""'),
        ('"😀😀😀"', 2, '"😀😀"'),
        (r'"\ud83d\ude00\ud83d\ude00x"', 2, r'"\ud83d\ude00\ud83d\ude00"'),
        (r'"\ud83dx"', 1, r'"\ud83d"'),
        (r'"\"\\\n\u0007é"', 3, r'"\"\\\n"'),
        (r'"\"\\\n\u0007é"', 4, r'"\"\\\n\u0007"'),
        ('"äöü"', 2, '"äö"'),
        (base64_of(b"abcdefg"), 7, base64_of(b"abcdefg")),
        *(
            (base64_of(b"abcdefg"), length, base64_of(b"abcdefg"[:length]))
            for length in range(1, 7)
        ),
        ("null", 1, "null"),
        (UNCHANGED, 1, UNCHANGED),
    ],
)
def test_characters_are_counted(value: str, length: int, left: str) -> None:
    """Code points count, however they are escaped; of binary data bytes do; nothing is cut in two."""
    image = f'{{"id":1,"note":{value},"_unchanged":2}}'
    found = shown(image, truncate={"users.note": length})

    assert found == f'{{"id":1,"note":{left},"_unchanged":2}}'


def test_null_documents_stay() -> None:
    """The tab behind one belongs to it, whatever is done with the columns around it."""
    image = '{"id":1,"i":null\t,"note":null\t,"_unchanged":2}'
    assert shown(image, truncate={"users.note": 1}) == image
    assert shown(image, exclude=["users.i"]) == '{"id":1,"note":null\t,"_unchanged":2}'


@pytest.mark.parametrize("value", ["1", "true", "[1]", '{"a":1}', '{"_base64":"YQ==","a":1}'])
def test_only_text_is_truncated(value: str) -> None:
    """A value that has no characters to take away stops with its column, and is not in the message."""
    with pytest.raises(SourceMisconfigured, match=r"column note \(varchar\(9\)\)") as error:
        shown(f'{{"id":1,"note":{value}}}', truncate={"users.note": 1})
    assert value not in str(error.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"alice@example.com"', "alice@example.com"),
        (r'"a\"\\\/\b\f\n\r\tb"', 'a"\\/\b\f\n\r\tb'),
        (r'"\u00e9\u20ac\ud83d\ude00"', "é€😀"),
        ("4711", "4711"),
        ('{"a":[1,"x"]}', '{"a":[1,"x"]}'),
        (base64_of(b"abc"), base64_of(b"abc")),
        ('""', ""),
    ],
)
def test_a_hash_is_of_salt_and_text(value: str, text: str) -> None:
    """Of a string its characters are hashed, of everything else its JSON text."""
    digits = hashlib.sha256(f"{SALT}{text}".encode()).hexdigest()

    assert shown(f'{{"note":{value}}}', hash=["*.note"]) == f'{{"note":"{digits}"}}'


def test_rows_before_one_that_cannot_be_shown_are_shown() -> None:
    """What stops at a row says which, in whichever of its images it is."""
    hiding = Hiding(rules(truncate={"users.note": 1}))
    hiding.add(2, table())
    texts, ends = [], np.empty((3, 3), np.int64)
    for text, rows in enumerate(
        (["", "", ""], ["{}", '{"note":"ab"}', '{"note":1}'], ["", "", ""])
    ):
        texts.append(np.frombuffer("".join(rows).encode(), np.uint8))
        ends[text] = np.cumsum([len(row) for row in rows])
    valid = (np.diff(ends, axis=1, prepend=0) > 0).astype(np.uint8)

    found = hiding.show(texts, ends, valid, np.array([7, 2, 2]))

    assert found.rows == 2
    assert found.texts[1][: found.ends[1, 1]].tobytes() == b'{}{"note":"a"}'
    assert isinstance(found.error, SourceMisconfigured)


def test_an_image_of_another_table_is_refused() -> None:
    """Columns that the table does not have, or not in this order, are no guess."""
    with pytest.raises(CorruptLog, match="other columns"):
        shown('{"note":"a","id":1}', exclude=["users.note"])


def test_tables_without_rules_pass_untouched() -> None:
    """Where no rule hides anything the very same memory comes back."""
    hidden = HiddenTable(rules(exclude=["shop.orders.note"]), table())
    column = pa.array(['{"id":1}'])
    hiding = Hiding(rules(exclude=["shop.orders.note"]))
    texts = [np.frombuffer(b"{}", np.uint8)] * 3
    ends, valid = np.full((3, 1), 2), np.ones((3, 1), np.uint8)

    assert hidden.column(column) is column
    assert hidden.visible == table()
    assert hiding.add(0, table()) is not None
    assert hiding.show(texts, ends, valid, np.zeros(1, np.int64)).texts is texts
