"""A database with the tables of a sink, and staged changes for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pydantic import SecretStr

from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.writer import PostgresWriter
from deltaforge_dagster.sinks.tables.writer import TableOwner
from tests.pipeline.lake.lake_tables import write_staged


def unguarded() -> None:
    """A guard that lets everything pass."""


@dataclass
class Target:
    """A database that a sink writes to.

    Attributes:
        dsn: Where it is.
        folder: Where staged files are.
    """

    dsn: str
    folder: Path
    numbers: Any = field(default_factory=itertools.count)
    opened: ExitStack = field(default_factory=ExitStack)

    def config(self, **options: Any) -> PostgresSinkConfig:
        """Options of the sink."""
        dsn = SecretStr(options.pop("dsn", self.dsn))
        table = options.pop("table", "${source.schema}.${source.table}")
        return PostgresSinkConfig(id="copy", dsn=dsn, table=table, **options)

    def writer(self, uid: str = "uid-1", **options: Any) -> PostgresWriter:
        """A writer, closed at the end; options are those of the sink."""
        owner = TableOwner(uid, options.pop("pipeline", "shop"), "copy")
        writer = PostgresWriter(self.config(**options), owner)
        self.opened.callback(writer.close)
        return writer

    def write(self, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
        """Write staged rows and return the file's name."""
        return write_staged(self.folder / f"staged-{next(self.numbers)}.parquet", rows, schema)

    def execute(self, *statements: str) -> None:
        """Execute statements in one transaction."""
        with psycopg.connect(self.dsn) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(
        self, columns: str = "*", table: str = "public.orders", order: str = "1"
    ) -> list[tuple[Any, ...]]:
        """The rows of a table."""
        with psycopg.connect(self.dsn) as connection:
            query = f"SELECT {columns} FROM {table} ORDER BY {order}"
            return connection.execute(query).fetchall()

    def types(self, table: str = "public.orders") -> dict[str, str]:
        """The columns of a table and their types."""
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        with psycopg.connect(self.dsn) as connection:
            return dict(connection.execute(query, [table]).fetchall())

    @contextmanager
    def role(self, *grants: str, name: str) -> Iterator[str]:
        """Lend the DSN of a role with a password of its own and these grants."""
        self.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret-of-{name}'")
        try:
            self.execute(*(grant.format(role=name) for grant in grants))
            given = psycopg.conninfo.conninfo_to_dict(self.dsn)
            yield psycopg.conninfo.make_conninfo("", **given | {"user": name, "password": f"secret-of-{name}"})  # fmt: skip
        finally:
            self.opened.close()
            self.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")
