from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sources.base import ChangeBatch
from deltaforge_dagster.sources.mysql.decoder import Decoder
from tests.sources.mysql.reference import Catalog, Progress, Reference, Registry
from tests.sources.mysql.strategies import Made, streams


def make_decoder(**changed: Any) -> Decoder:
    """Return a decoder that captures everything, with some arguments changed."""
    arguments: dict[str, Any] = {
        "source_id": "shop-db",
        "progress": Progress(),
        "registry": Registry(),
        "catalog": Catalog(),
        "captures": lambda _database, _table: True,
    }
    return Decoder(**arguments | changed)


def decode(
    stream: bytes, cuts: tuple[int, ...] = (), **changed: Any
) -> tuple[list[ChangeBatch], DeltaforgeError | None]:
    """Feed the stream in the pieces that `cuts` makes, as the socket part does."""
    decoder = make_decoder(**changed)
    batches: list[ChangeBatch] = []
    tail, at = b"", 0
    for cut in (*sorted(cuts), len(stream)):
        piece = bytearray(tail + stream[at:cut])
        decoded = decoder.feed(piece, len(piece))
        assert 0 <= decoded.consumed <= len(piece)
        batches += decoded.batches
        tail, at = bytes(piece[decoded.consumed :]), cut
        piece[:] = bytes(len(piece))  # what came out must not look into the buffer any more
        if decoded.error or decoded.foreign:
            return batches, decoded.error
    assert not tail
    return batches, None


def rows_of(batches: list[ChangeBatch]) -> list[dict[str, Any]]:
    """Return all rows."""
    return [row for batch in batches if batch.rows for row in batch.rows.to_pylist()]


def _same_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose images are compared as lists of pairs: 1e+22 is 1e22, 1 is 1.0."""
    images = {
        name: row[name]
        and json.loads(row[name], object_pairs_hook=list, parse_int=_number, parse_float=_number)
        for name in ("before", "after", "key")
    }
    return row | images


def _number(text: str) -> tuple[str, float | int]:
    integer = text.lstrip("-").isdigit()
    return ("number", int(text) if integer else float(text))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(streams(), st.data())
def test_decodes_like_the_reference(made: Made, data: st.DataObject) -> None:
    """Any valid stream, cut anywhere into pieces, gives what the plain Python decoder reads."""
    cuts = data.draw(st.lists(st.integers(0, len(made.stream)), max_size=6))
    batches, error = decode(made.stream, tuple(cuts), captures=lambda db, _table: db == "shop")

    reference = Reference("shop-db", made.tables).decode(made.stream)
    rows = rows_of(batches)
    assert error is None
    compared = list(reference.rows[0]) if reference.rows else []
    assert [_same_numbers(row) for row in reference.rows] == [
        _same_numbers({name: row[name] for name in compared}) for row in rows
    ]
    for batch in batches:
        if batch.rows:
            batch.rows.validate(full=True)
