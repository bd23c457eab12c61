from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.json_text import INTEGER, JSON, STRING
from deltaforge_dagster.sources.postgres.decode.types import PostgresValueType
from deltaforge_dagster.sources.postgres.snapshot.copy_text import read_copied
from deltaforge_dagster.sources.postgres.snapshot.selected import PostgresSelectedRows

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from("\\\b\f\n\r\t\vN.")
)
ESCAPES = {
    "\\": "\\\\",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
}


def copied(rows: list[tuple[str | None, ...]]) -> bytes:
    """Return rows as COPY writes them."""
    lines = (
        "\t".join("\\N" if v is None else "".join(ESCAPES.get(c, c) for c in v) for v in row)
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines).encode()


@given(st.lists(st.tuples(st.none() | TEXTS, st.none() | TEXTS)))
def test_every_text_comes_back(rows: list[tuple[str | None, ...]]) -> None:
    r"""Whatever a text holds, its row image has it; null and `\N` as text are kept apart."""
    text = PostgresValueType("text", STRING)
    images, keys = PostgresSelectedRows({"a": text, "b": text}).write(copied(rows))

    assert [tuple(json.loads(i).values()) for i in images.to_pylist() if i] == rows
    assert keys.null_count == len(rows)


def test_rows_larger_than_the_first_room() -> None:
    """Values that grow as JSON are written all the same; the key is written beside the image."""
    rows: list[tuple[str | None, ...]] = [(str(n), "\x01" * 50_000) for n in range(9)]
    types = {"id": PostgresValueType("integer", INTEGER), "text": PostgresValueType("text", STRING)}
    images, keys = PostgresSelectedRows(types, ("id",)).write(copied(rows))

    assert [json.loads(image or "")["text"] for image in images.to_pylist()] == [rows[0][1]] * 9
    assert keys.to_pylist() == [f'{{"id":{n}}}' for n in range(9)]


@pytest.mark.parametrize(
    "text",
    [b"a", b"a\tb", b"a\n", b"a\tb\tc\n", b"a\t\\q\n", b"a\t\\\n", b"a\nb\tc\td\n", b"\\N\\N\tb"],
)
def test_other_bytes_are_refused(text: bytes) -> None:
    """Lines with other counts, unknown escapes and cut ends are no COPY text."""
    with pytest.raises(CorruptLog):
        read_copied(text, 2)


def test_bad_values_are_named_without_the_value() -> None:
    """A value that is not of its type's form stops with its column and type."""
    rows = PostgresSelectedRows({"doc": PostgresValueType("jsonb", JSON)})

    with pytest.raises(CorruptLog, match=r"form: column doc \(jsonb\)$"):
        rows.write(b"{secret\n")
    with pytest.raises(UnsupportedEvent, match="nested deeper than"):
        rows.write(b"[" * 70_000 + b"]" * 70_000 + b"\n")
