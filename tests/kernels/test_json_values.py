"""JSON documents as values of columns: two of them have white space, so that they are not what has their text."""

from __future__ import annotations

import numpy as np
import pytest

from deltaforge_dagster.kernels.json_text import JSON, MAX_DEPTH, OVERHEAD, write_scalar
from deltaforge_dagster.kernels.runtime import read_only


@pytest.mark.parametrize(
    ("document", "written"),
    [
        (" null ", "null\t"),
        ('{"_unchanged": true}', '{"_unchanged":true }'),
        ('{"_unchanged":true}', '{"_unchanged":true }'),
        ('{"a": null}', '{"a":null}'),
        ('"null"', '"null"'),
        ("[ null ]", "[null]"),
        ('{"_unchanged":false}', '{"_unchanged":false}'),
    ],
)
def test_documents_as_values(document: str, written: str) -> None:
    """They are compact, but for these two, and stay within their room."""
    content = document.encode()
    out = np.zeros(len(content) + OVERHEAD, np.uint8)
    stack = np.empty(MAX_DEPTH, np.uint8)
    end = write_scalar(JSON, read_only(content), 0, len(content), out, 0, stack)
    assert out[:end].tobytes().decode() == written
