"""The source type `mysql`, for MySQL and MariaDB: its options, value types and names."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import Block, Text, resolved
from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.globs import overlap, table_parts
from deltaforge_dagster.config.owned import OwnedResource, server_place
from deltaforge_dagster.config.secrets import NOT_ENCODED, check_encoded, mask
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig, TablePattern
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library, Arrow and kernels
    import pyarrow as pa

    from deltaforge_dagster.sources.mysql.snapshot.read_view import GtidReadView, PositionReadView
    from deltaforge_dagster.sources.mysql.source import MysqlSource


def _share_a_table(pattern: str, other: str) -> bool:
    """Return whether some MySQL table matches both patterns."""
    parts = zip(table_parts(pattern), table_parts(other), strict=True)
    return all(overlap(first, second) for first, second in parts)


def _outbox_pattern(text: str) -> str:
    if not all(table_parts(text)):
        raise ValueError(
            "is not a table pattern (write database.table, where * and % are any text)"
        )
    return text


class OutboxTables(Block):
    """Which tables are outboxes."""

    tables: Annotated[
        tuple[Annotated[Text, AfterValidator(_outbox_pattern)], ...], Field(min_length=1)
    ]
    """Patterns of outbox tables, `database.table` or `table` in any database; `*` and `%` match any
    text, anywhere. The source's `tables` must capture them, too.
    """


class MysqlSourceConfig(SourceConfig):
    """How to read the server's binary log."""

    id: Text
    """Identifies the source; part of every event id, and the replica's server id is derived from
    it. If absent, the pipeline's name is used, with a warning.
    """
    dsn: SecretStr
    """`mysql://user:password@host:port/database?ssl-mode=VERIFY_CA&ssl-ca=...`, with the options
    `ssl-mode`, `ssl-ca`, `ssl-cert` and `ssl-key` of MySQL's own programs; other options are
    rejected.
    """
    tables: tuple[TablePattern, ...] = ()
    """Tables to capture: `shop.orders`; `orders` means that table in any database; a part may end
    in `*` or `%`. Absent or `[]` means every user table. Case-sensitive; `_` is an ordinary
    character.
    """
    on_schema_drift: OnSchemaDrift = "adapt"
    """What to do when another server has taken the source's place and its tables differ: continue
    with them, or stop. See "Another server" in [mysql.md](mysql.md).
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxTables | None = None
    """Which tables are outboxes; see [outbox](processors.md#outbox)."""

    @model_validator(mode="after")
    def _check_outbox(self) -> MysqlSourceConfig:
        for pattern in () if self.outbox is None else self.outbox.tables:
            if self.tables and not any(_share_a_table(pattern, table) for table in self.tables):
                raise ValueError(
                    f"outbox.tables: {pattern} matches no table that `tables` captures (an outbox "
                    "is captured like any table: add it there, too)"
                )
        return self

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: SecretStr) -> SecretStr:
        try:
            mysql_dsn(resolved(dsn.get_secret_value()))
        except SpecError as error:
            raise ValueError(str(error)) from None
        return dsn

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


SslMode = Literal["DISABLED", "PREFERRED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"]
_SSL_MODES: tuple[str, ...] = get_args(SslMode)


@dataclass(frozen=True, slots=True)
class MysqlDsn:
    """The address and login of a MySQL server.

    Attributes:
        database: The session's default database, or "".
        ssl_mode: As in MySQL's programs: `PREFERRED` uses TLS if the server supports it; only the
            `VERIFY_` modes check the server's certificate.
        ssl_ca, ssl_cert, ssl_key: Paths of PEM files.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    ssl_mode: SslMode = "PREFERRED"
    ssl_ca: str | None = None
    ssl_cert: str | None = None
    ssl_key: str | None = None


def mysql_dsn(text: str) -> MysqlDsn:
    """Parse a MySQL URL.

    For example: `mysql://user:password@host:port/database?ssl-mode=VERIFY_CA&ssl-ca=/etc/ca.pem`.
    The options are those of MySQL's own programs (manual: "Command Options for Encrypted
    Connections"); others are rejected, because an ignored option might have been meant to protect
    the connection.

    Raises:
        SpecError: The text is not a MySQL URL, or its options are unknown or inconsistent. Of the
            text, the message quotes at most the name of an option and the `ssl-mode`.
    """
    if text.startswith("mysql://"):
        check_encoded(text)
    parts = _mysql_url(text)
    if parts is None:
        raise SpecError(_WRONG_URL)
    ssl_options = _ssl_options(parse_qsl(parts.query, keep_blank_values=True))
    return MysqlDsn(
        host=unquote(parts.hostname or "localhost"),
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.removeprefix("/")),
        ssl_mode=cast("SslMode", ssl_options["ssl-mode"] or "PREFERRED"),
        ssl_ca=ssl_options["ssl-ca"],
        ssl_cert=ssl_options["ssl-cert"],
        ssl_key=ssl_options["ssl-key"],
    )


_WRONG_URL = (
    "is not a MySQL connection string (write mysql://user:password@host:port/database, with "
    "special characters of the password percent-encoded)"
)


def _mysql_url(text: str) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        valid = parts.scheme == "mysql" and parts.username and parts.port != 0
    except ValueError:
        return None  # the error's message quotes a part of the text
    return parts if valid and not parts.fragment else None


def _ssl_options(options: list[tuple[str, str]]) -> dict[str, str | None]:
    values: dict[str, str | None] = dict.fromkeys(("ssl-mode", "ssl-ca", "ssl-cert", "ssl-key"))
    for name, value in options:
        if "@" in value and name not in values:
            raise SpecError(NOT_ENCODED)  # the option's name may be a part of the password
        if name not in values:
            raise SpecError(
                f"has the option {name[:40]!r}, which is not known (known are {', '.join(values)})"
            )
        values[name] = value or None
    mode = values["ssl-mode"] = values["ssl-mode"] and values["ssl-mode"].upper()
    if mode is not None and mode not in _SSL_MODES:
        raise SpecError(f"has an ssl-mode that is not known (known are {', '.join(_SSL_MODES)})")
    if (mode or "").startswith("VERIFY_") and values["ssl-ca"] is None:
        raise SpecError(f"has ssl-mode {mode} without ssl-ca (name the file of the authority)")
    if values["ssl-key"] is not None and values["ssl-cert"] is None:
        raise SpecError("has ssl-key without ssl-cert")
    return values


_IDS = 4_000_000_000  # server ids have 32 bits, and 0 is none


def server_id(source_id: str, purpose: str = "read") -> int:
    """Return the replication server id of a source for a purpose.

    If two readers of a server have the same id, the server ends the older one. So a short look at
    the log must not have the id of a run's reader.

    For `read` it is 1 + CRC32 of the source's id. The other purposes are `peek`, `look ahead`,
    `prepared`, `again`, `sections`, `rights`, and `section` with a number.
    """
    text = source_id if purpose == "read" else f"{source_id}/{purpose}"
    return 1 + zlib.crc32(text.encode()) % _IDS


_BYTES = replace(types.BINARY, form="text")
_GEOMETRY = ValueType("geometry", form="srid")
_NAMED = {
    "tinyint": types.INT8,
    "smallint": types.INT16,
    "mediumint": types.INT32,
    "int": types.INT32,
    "bigint": types.INT64,
    "tinyint unsigned": types.UINT8,
    "smallint unsigned": types.UINT16,
    "mediumint unsigned": types.UINT32,
    "int unsigned": types.UINT32,
    "bigint unsigned": types.UINT64,
    "float": types.FLOAT32,
    "double": types.FLOAT64,
    "float unsigned": types.FLOAT32,
    "double unsigned": types.FLOAT64,
    "year": types.INT16,
    "date": types.DATE,
    "time": types.TIME,
    "datetime": types.TIMESTAMP,
    "timestamp": replace(types.TIMESTAMPTZ, form="micros"),
    "json": types.JSON,
    "uuid": types.UUID,
    "vector": types.list_of(types.FLOAT32),
    "binary": _BYTES,
    "varbinary": _BYTES,
    "tinyblob": types.BINARY,
    "blob": types.BINARY,
    "mediumblob": types.BINARY,
    "longblob": types.BINARY,
} | dict.fromkeys(
    (
        "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
        "multipolygon", "geometrycollection", "geomcollection",
    ),
    _GEOMETRY,
)  # fmt: skip
_NAME = re.compile(
    r"(?P<name>[a-z]+)(?:\((?P<first>\d+)(?:,(?P<second>\d+))?\))?(?P<unsigned> unsigned)?"
)


def value_type(data_type: str, options: ValueOptions) -> ValueType:
    """Return the value type of a column type; text for a column type that has none of its own.

    Args:
        data_type: The name of the column type.
        options: The forms that the pipeline file asks for.
    """
    match = _NAME.fullmatch(data_type)
    if match is None:
        return types.TEXT
    name, first = match["name"], int(match["first"] or 0)
    if name == "decimal":
        return types.decimal(first, int(match["second"] or 0))
    if name == "bit":
        return next(
            integer
            for integer in (types.UINT8, types.UINT16, types.UINT32, types.UINT64)
            if first <= integer.bits
        )
    if name == "enum" and options.mysql_enum == "index":
        return types.UINT16
    if name == "set" and options.mysql_set == "bits":
        return types.UINT64
    return _NAMED.get(name + (match["unsigned"] or ""), types.TEXT)


class MysqlSourceType(SourceType[MysqlSourceConfig]):
    """A server of MySQL or MariaDB, through its binary log."""

    name = "mysql"
    sample: Mapping[str, Any] = {"dsn": "{{ env.MYSQL_DSN }}", "tables": ["shop.*"]}
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
        fits = number < 1 << 24 and position.pos < 1 << 40  # 64 bits together
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
