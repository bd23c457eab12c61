"""Synthetic replication streams of one type family each, to measure what decoding its values costs.

Every row has a key and ten columns of one type. A thousand distinct rows, in transactions of a
hundred, are repeated as often as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_lab.synthetic.postgres_messages import begin, commit, insert, relation

_COLUMNS = 10
_ROWS = 1000
_ROWS_PER_TX = 100
_OID = 16386

_FAMILIES: Mapping[str, tuple[int, Callable[[int], bytes]]] = {
    "booleans": (16, lambda n: b"tf"[n % 2 : n % 2 + 1]),
    "integers": (20, lambda n: b"%d" % (n * 7_919_123_457 - 10**12)),
    "floats": (701, lambda n: b"%d.%05d" % (n, n * 7919 % 100_000)),
    "numerics": (1700, lambda n: b"%d.%02d" % (n * 7919 % 10**8, n % 100)),
    "texts": (25, lambda n: b"customer %05d of the shop" % (n * 7919 % 100_000)),
    "escaped": (25, lambda n: b'line one\n"line" %05d\t\\ end' % (n * 7919 % 100_000)),
    "timestamps": (1184, lambda n: b"2026-03-%02d 12:%02d:00.%06d+00" % (n % 28 + 1, n % 60, n)),
    "uuids": (2950, lambda n: b"a0eebc99-9c0b-4ef8-bb6d-6bb9%08x" % (n * 2_654_435_761 % 2**32)),
    "bytes": (17, lambda n: b"\\x" + b"%064x" % (n * 7919 << 200)),
    "documents": (
        3802,
        lambda n: b'{"id": %d, "name": "item %d", "tags": ["a", "b"], "price": %d.50}' % (n, n, n),
    ),
    "integer arrays": (1016, lambda n: b"{%d,%d,NULL,%d,7}" % (n, n * 7919, n % 100)),
    "text arrays": (1009, lambda n: b'{red,"dark blue %d",NULL,"say \\"hi\\""}' % n),
}
"""By name: the type OID, and a function that makes the text of a value from a number."""

NAMES = tuple(_FAMILIES)
"""The names of the families, for `stream`."""


def stream(family: str, rows: int) -> bytes:
    """Return a stream of at least `rows` inserts into a table of that family."""
    oid, text = _FAMILIES[family]
    columns = [("id", 20, -1, True), *((f"c{n}", oid, -1, False) for n in range(_COLUMNS))]
    parts = []
    for first in range(0, min(rows, _ROWS), _ROWS_PER_TX):
        parts.append(xlog(1000, begin(1050, 0, 7)))
        for number in range(first, first + _ROWS_PER_TX):
            cells = [text(number * _COLUMNS + column) for column in range(_COLUMNS)]
            parts.append(xlog(1000, insert(_OID, [b"%d" % number, *cells])))
        parts.append(xlog(1050, commit(1050, 1060, 0)))
    described = xlog(1000, begin(1050, 0, 7)) + xlog(0, relation(_OID, "public", "t", columns))
    described += xlog(1050, commit(1050, 1060, 0))
    return described + b"".join(parts) * -(
        -rows // (len(parts) // (_ROWS_PER_TX + 2) * _ROWS_PER_TX)
    )
