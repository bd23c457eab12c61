"""A decoder for synthetic streams (`messages`): to compile the kernels, and to measure them."""

from __future__ import annotations

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_dagster.sources.postgres.decode.types import CatalogType
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.synthetic.messages import message, orders
from deltaforge_dagster.tables import SchemaStamp, TableSchema


def warm() -> None:
    """Compile every kernel, or load it from the cache, by decoding a small synthetic stream."""
    stream = xlog(1, message(1, "warm", b"{}", transactional=False)) + orders(2)
    synthetic_decoder().feed(stream, len(stream))


def synthetic_decoder() -> PostgresDecoder:
    """Return a decoder for synthetic streams (`messages`): no registry, only built-in types."""
    return PostgresDecoder(
        source_id="made-up",
        db="made-up",
        start=LsnPosition(0),
        registry=_NoRegistry(),
        catalog=_BuiltInTypes(),
        captures=lambda _schema, _table: True,
    )


class _NoRegistry:
    """A registry that keeps nothing, for a stream that means nothing."""

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Return a synthetic stamp."""
        del table, position
        return SchemaStamp("sha256:", 1, 1)


class _BuiltInTypes:
    """A catalog that knows only the built-in types."""

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Know no key."""
        del relation
        return ()

    def type(self, oid: int) -> CatalogType | None:
        """Know no type."""
        del oid
        return None

    def system_type(self, name: str) -> int | None:
        """Know no name."""
        del name
        return None

    def remade_type(self, schema: str, name: str) -> int | None:
        """Know no name."""
        del schema, name
        return None
