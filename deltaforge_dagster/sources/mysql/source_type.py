"""The source type `mysql`, for MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.owned import OwnedResource, server_place
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.mysql.config import MysqlSourceConfig, mysql_dsn
from deltaforge_dagster.sources.mysql.connection.server_ids import server_id
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.value_types import value_type
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library, Arrow and kernels
    import pyarrow as pa

    from deltaforge_dagster.sources.mysql.snapshot.read_view import GtidReadView, PositionReadView
    from deltaforge_dagster.sources.mysql.source import MysqlSource


class MysqlSourceType(SourceType[MysqlSourceConfig]):
    """A server of MySQL or MariaDB, through its binary log."""

    name = "mysql"
    title = "MySQL"
    summary = "A MySQL source: the binary log, read as a replica does."
    config = MysqlSourceConfig
    connector = "mysql"
    position_example = "{file: mysql-bin.000003, pos: 4}, perhaps with gtid_set"
    outbox = "tables"
    second_digits = 0
    consequences = {  # noqa: RUF012 - constant
        "id": "events captured after the change have other ids; the server sees another replica",
    }

    def build(self, config: MysqlSourceConfig, context: SourceContext) -> MysqlSource:
        """Return a source, without connecting to the server."""
        from deltaforge_dagster.sources.mysql.source import MysqlSource  # noqa: PLC0415 - kernels

        engine = context.engine
        return MysqlSource(
            config, context.pipeline, engine.values, engine.columns, context.keeps_rows
        )

    def position(self, fields: Mapping[str, Any]) -> BinlogPosition | None:
        """Return the position in these fields; None if there is no `file`."""
        return BinlogPosition.from_fields(fields)

    def position_fields(self, config: MysqlSourceConfig) -> tuple[PositionField, ...]:
        """Return the fields `server_id` (the one of our reader), `gtid`, `file` and `pos`."""
        return (
            PositionField("server_id", constant=str(server_id(config.id))),
            PositionField("gtid", "tx_id", "plain"),
            PositionField("file", "file", "string"),
            PositionField("pos", "pos", "number"),
        )

    def read_view(self, fields: Mapping[str, Any]) -> GtidReadView | PositionReadView | None:
        """Return the read view in these fields; None if there is neither `gtid_set` nor `file`."""
        # Arrow is imported only when it is needed.
        from deltaforge_dagster.sources.mysql.snapshot.read_view import read_view  # noqa: PLC0415

        return read_view(fields)

    def value_type(self, column: Column, options: ValueOptions) -> ValueType:
        """Return the value type of a column, in the form that the pipeline file asks for."""
        return value_type(column.data_type, options)

    def position_number(self, position: Position) -> int | None:
        """Return the number of the file and, in the lower 40 bits, the offset in it.

        None if they are too large.
        """
        assert isinstance(position, BinlogPosition)
        number = int(position.file.rpartition(".")[2])
        fits = number < 1 << 24 and position.pos < 1 << 40
        return number << 40 | position.pos if fits else None

    def imported(self, position: Position) -> Position:
        """Return the position without its GTID set.

        Inside a transaction, the set would already contain that transaction.
        """
        assert isinstance(position, BinlogPosition)
        return replace(position, gtid_set=None)

    def rows_until(self, rows: pa.RecordBatch, end: Position) -> int:
        """Return how many of the rows are in earlier files than `end`, or in its file up to it."""
        import numpy as np  # noqa: PLC0415 - slow to import

        assert isinstance(end, BinlogPosition)
        if not rows.num_rows:
            return 0
        files = rows.column("file").dictionary_encode()
        starts = [BinlogPosition(str(name), 0) for name in files.dictionary.to_pylist()]
        end_start = BinlogPosition(end.file, 0)
        order = np.array([(end_start < start) - (start < end_start) for start in starts], np.int64)
        of_file = order[files.indices.to_numpy()]
        positions = rows.column("pos").to_numpy()
        inside = (of_file < 0) | ((of_file == 0) & (positions <= end.pos))
        return int(np.count_nonzero(inside))

    def table_variables(self, pattern: str) -> Mapping[str, str]:
        """Return the variables for database and table.

        A pattern without a database determines only the table.
        """
        first, dot, rest = pattern.partition(".")
        return {"source.db": first, "source.table": rest} if dot else {"source.table": first}

    def names(self, config: MysqlSourceConfig, pipeline: str) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the replication server id of our reader."""
        return {"server id of the reader": server_id(config.id)}

    def database_place(self, config: MysqlSourceConfig) -> tuple[str, ...]:
        """Return the server."""
        dsn = mysql_dsn(config.dsn.get_secret_value())
        return (server_place(dsn.host, dsn.port),)

    def owned(self, config: MysqlSourceConfig) -> Sequence[OwnedResource]:
        """Return the server id of our reader.

        If two readers have the same id, the server ends the connection of the older one.
        """
        purpose = "the reader of the binary log with the server id of source"
        return [
            OwnedResource(purpose, self.database_place(config), config.id, "spec.source.config.id")
        ]

    def warm(self) -> None:
        """Compile the kernels of the log, or load them from the cache."""
        from deltaforge_dagster.sources.mysql import warm  # noqa: PLC0415

        warm.warm()

    def warm_snapshots(self) -> None:
        """Compile the kernels of snapshots, or load them from the cache."""
        from deltaforge_dagster.sources.mysql.snapshot import selected  # noqa: PLC0415

        selected.warm()


MYSQL = MysqlSourceType()
