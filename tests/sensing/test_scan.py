"""Cells of documents: the location of each value and each name."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from deltaforge_dagster.sensing.scan import ANY, NO_KEY, TYPES, Path, child, path_number, scan
from tests.sensing.reference import type_of
from tests.sensing.test_schema import documents


def values(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return every value of a document with its path, outer values first."""
    inside = (
        [("." + name, one) for name, one in value.items()]
        if isinstance(value, dict)
        else [("[]", one) for one in value]
        if isinstance(value, list)
        else []
    )
    return [(path, value), *(found for step, one in inside for found in values(one, (*path, step)))]


@given(st.lists(documents, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_every_value_is_a_cell(stream: list[Any], ascii_only: bool, spaced: bool) -> None:
    """The cells are in order, with path, type, text and name."""
    texts = [
        json.dumps(one, ensure_ascii=ascii_only, indent=1 if spaced else None) for one in stream
    ]

    cells = scan(pa.array(["", *texts], pa.string()).slice(1), 20)

    expected = [(n, path, one) for n, top in enumerate(stream) for path, one in values(top)]
    assert cells.document.tolist() == [document for document, _, _ in expected]
    assert cells.path.tolist() == [path_number(path) for _, path, _ in expected]
    for cell, (_, path, value) in enumerate(expected):
        assert TYPES[cells.type[cell]] == type_of(value)
        assert json.loads(cells.text(cell)) == value
        if path:
            assert cells.step(cell) == path[-1]
        else:
            assert cells.key_start[cell] == NO_KEY


def test_maps_have_one_path_for_all_names() -> None:
    """Below a map names are not distinguished, except stable ones."""
    root = path_number(())
    text = pa.array(['{"a":1,"b":{"c":2},"total":3}'])

    cells = scan(text, 5, [root], [child(root, ".total")])

    below = path_number((ANY, ".c"))
    assert cells.path.tolist() == [
        root, child(root, ANY), child(root, ANY), below, child(root, ".total")
    ]  # fmt: skip
    assert [cells.step(n) for n in range(1, 5)] == [ANY, ANY, ".c", ".total"]
    assert cells.names(cells.path == child(root, ANY)).to_pylist() == ["a", "b"]


@given(st.lists(st.text('{}[]":,\\ a1n\n'), min_size=1, max_size=4))
@example(stream=["{"])
@example(stream=['{"a'])
@example(stream=['"\\'])
def test_no_text_leads_astray(stream: list[str]) -> None:
    """For any text, cells lie within the text: nothing is read beyond its end."""
    cells = scan(pa.array([*stream, '{"a":1}'], pa.string()), 3)

    bounds = [0]
    for one in [*stream, '{"a":1}']:
        bounds.append(bounds[-1] + len(one))
    for cell, document in enumerate(cells.document.tolist()):
        assert bounds[document] <= cells.start[cell] <= cells.stop[cell] <= bounds[document + 1]
