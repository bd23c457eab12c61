from __future__ import annotations

import json

import pytest

from deltaforge_lab.synthetic.mysql_type_families import COLUMNS, NAMES, stream
from tests.sources.mysql.decode.test_decoder import decode, rows_of


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_decoded(name: str) -> None:
    """The synthetic logs of all type families are whole, with values in every column."""
    batches, error = decode(stream(name, 100))

    images = [json.loads(row["after"]) for row in rows_of(batches) if row["op"] == "c"]
    assert error is None
    assert len(images) == 100
    assert all(len(image) == COLUMNS + 1 and None not in image.values() for image in images)
