"""Compile the decoder's kernels in advance, by decoding a small sample of a stream."""

from __future__ import annotations

from deltaforge_dagster.sources.base import DetachedRegistry, SchemaRegistry
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.types import CatalogType
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableContext
from deltaforge_dagster.sources.postgres.position import LsnPosition

SAMPLE = bytes.fromhex("""
6400000032770000000000000001000000000000000100000000000000004d0000000000000000017761726d00000000
027b7d64000000327700000000016b000000000000016b000000000000000000004200000000016b01900002d79883d2
0000000002bc64000000937700000000000000000000000000000000000000000000000052000040017075626c696300
6f7264657273006400060169640000000014ffffffff00637573746f6d65720000000019ffffffff00616d6f756e7400
000006a4000a0006007374617475730000000019ffffffff00637265617465645f6174000000045affffffff006e6f74
650000000019ffffffff64000000957700000000016b00c800000000016b00c8000000000000000049000040014e0006
740000000130740000000e637573746f6d65722d30303030307400000004302e303074000000036e6577740000001a32
3032362d30332d30312031323a30303a30302e30303030303074000000226f7264657220303a206c6561766520617420
74686520646f6f722c20706c6561736564000000967700000000016b019000000000016b019000000000000000004900
0040014e0006740000000131740000000e637573746f6d65722d30373931397400000004312e30317400000004706169
64740000001a323032362d30332d30322031323a30303a30312e30303030303174000000226f7264657220313a206c65
6176652061742074686520646f6f722c20706c6561736564000000377700000000016b01c000000000016b01c0000000
0000000000430000000000016b019000000000016b01c00002d79883d20000
""")
"""A small stream: a logical message, and a transaction with two inserts of six columns."""

_UNREGISTERED = DetachedRegistry()


def warm() -> None:
    """Compile every kernel, or load it from the cache, by decoding the sample."""
    detached_decoder().feed(SAMPLE, len(SAMPLE))


def detached_decoder(registry: SchemaRegistry = _UNREGISTERED) -> PostgresDecoder:
    """Return a decoder that needs no server.

    It knows only built-in types, and has no registry unless one is given.
    """
    context = PostgresTableContext(
        "sample", registry, _BuiltInTypes(), captures=lambda _schema, _table: True
    )
    return PostgresDecoder(context, source_id="sample", start=LsnPosition(0))


class _BuiltInTypes:
    """A catalog without tables and types; the decoder knows the built-in types without it."""

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Return no columns: no table has a primary key."""
        del relation
        return ()

    def type(self, oid: int) -> CatalogType | None:
        """Return None: there are no types."""
        del oid
        return None

    def system_type(self, name: str) -> int | None:
        """Return None: there are no types."""
        del name
        return None

    def remade_type(self, schema: str, name: str) -> int | None:
        """Return None: there are no types."""
        del schema, name
        return None
