"""The ClickHouse sink as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deltaforge_dagster.config.owned import server_place
from deltaforge_dagster.sinks.registry import (
    KEYS_CHANGED,
    LATER_CHANGES,
    NEEDS_RESYNC,
    TABLES_MOVED,
    DatabaseSinkType,
    SinkContext,
)
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # they need Arrow
    from deltaforge_dagster.sinks.tables.comparer import TableComparer
    from deltaforge_dagster.sinks.tables.writer import TableOwner, TableWriter
    from deltaforge_dagster.typed_rows.schema import TargetTypes
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import AlsoAccepts, Block, Seconds, Text
from deltaforge_dagster.sinks.tables.config import TableSinkConfig, TableTemplate

_VARIABLE = re.compile(r"\$\{[^}]*\}")


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        valid = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
        login = url.username is not None or url.password is not None
    except ValueError:
        valid = login = False
    if login:
        raise ValueError("holds a user or password (write them as `user` and `password`)")
    if not valid or url.query or url.fragment:
        raise ValueError(
            "is not the address of ClickHouse's HTTP interface (write http://host:8123, "
            "or https://host:8443)"
        )
    return text.rstrip("/")


def _mode(value: object) -> object:
    """Accept DeltaForge's name of a mode."""
    return "current" if value == "upsert" else value


class ClickhouseTls(Block):
    """TLS to ClickHouse."""

    enabled: bool = True
    """Whether TLS is used; the `url` must say the same."""
    ca_file: Text | None = None
    """File with the certificates of the authorities to trust, in PEM; by default those of the
    system.
    """
    insecure_skip_verify: bool = False
    """Accept every certificate. Anybody in between can then read and change everything."""


class ClickhouseSinkConfig(TableSinkConfig):
    """How to write to ClickHouse."""

    url: Annotated[Text, AfterValidator(_url)]
    """Address of the HTTP interface: `http://host:8123`, or `https://host:8443`."""
    database: Text
    """The database of the tables. It must exist."""
    table: TableTemplate = "${source.table}"
    """Template of the tables' names in the database: the name of one table, or with
    `${source.table}`. The other variables are `${source.db}` and `${source.schema}`. Each captured
    table needs a name of its own.
    """
    mode: Annotated[
        Literal["changelog", "current"], BeforeValidator(_mode), AlsoAccepts({"const": "upsert"})
    ] = "changelog"
    """What a table has: a row for every change (`changelog`), or the source's rows as they are now
    (`current`), which queries read with `FINAL` ([clickhouse.md](clickhouse.md)). `upsert`, as
    DeltaForge calls it, is accepted for `current`.
    """
    user: Text | None = None
    """The user; by default `default`."""
    password: SecretStr | None = None
    """The user's password."""
    tls: ClickhouseTls | None = None
    """TLS, for `https://`."""
    version_source: Literal["source_position", "ts_ms"] = "source_position"
    """What `_version` is made of: the position in the source's log, which orders the changes of a
    row exactly, or the time of the change, which [does not always](clickhouse.md#versions).
    """
    send_timeout_secs: Seconds = 30.0
    """How long the server may go without accepting or sending a byte; it answers when a query has
    ended.
    """
    auto_create: bool = True
    """Whether the sink creates tables, and adds and widens columns.

    Otherwise a table must exist with all of its columns.
    """

    @field_validator("table")
    @classmethod
    def _check_table(cls, table: str) -> str:
        if "." in _VARIABLE.sub("", table):
            raise ValueError(
                "has a dot: a table's name in a database has one part (write "
                "${source.schema}_${source.table})"
            )
        return table

    @model_validator(mode="after")
    def _check_tls(self) -> ClickhouseSinkConfig:
        if self.tls is not None and self.tls.enabled != self.secure:
            written, other = ("http", "https") if self.tls.enabled else ("https", "http")
            raise ValueError(
                f"url is {written}://, but tls.enabled is {str(self.tls.enabled).lower()} (write "
                f"{other}://, and the port of that interface)"
            )
        return self

    @property
    def secure(self) -> bool:
        """Whether TLS is used."""
        return self.url.startswith("https:")

    def name_of(self, database: str, schema: str | None, table: str) -> tuple[str, ...]:
        """Return database and name of the sink's table for a table of the source.

        Raises:
            TableRejected: The source's name cannot be part of the name of a table here.
        """
        return (self.database, *super().name_of(database, schema, table))

    @field_serializer("password")
    def _mask(self, secret: SecretStr | None) -> str | None:
        return None if secret is None else "***"


class ClickhouseSinkType(DatabaseSinkType[ClickhouseSinkConfig]):
    """Tables of a ClickHouse server."""

    name = "clickhouse"
    sample: Mapping[str, Any] = {
        "url": "{{ env.CLICKHOUSE_URL }}",
        "database": "NAME",
        "table": "${source.table}",
    }
    summary = "A ClickHouse sink: it keeps tables for analytics."
    config = ClickhouseSinkConfig
    destinations = "tables"
    timing = frozenset({"commit_seconds", "commit_changes", "send_timeout_secs"})
    consequences: Mapping[str, str] = {
        **dict.fromkeys(["url", "database", "table"], TABLES_MOVED),
        **dict.fromkeys(["mode", "version_source"], NEEDS_RESYNC),
        "keys": KEYS_CHANGED,
        "types": (
            "applies to columns that are created from now on; a table that has the column with "
            "another type needs a resync (deltaforge resync PIPELINE --sink SINK --tables TABLE)"
        ),
        **dict.fromkeys(["filter", "skipped_operations"], LATER_CHANGES),
    }

    def column_types(self) -> TargetTypes:
        """Return what ClickHouse's tables can have: all but times of a day."""
        from deltaforge_dagster.typed_rows.schema import TargetTypes  # noqa: PLC0415 - needs Arrow

        return TargetTypes(time=False)

    def owned_place(self, config: ClickhouseSinkConfig) -> tuple[str, ...]:
        """Return the server and the database."""
        url = urlsplit(config.url)
        return (server_place(url.hostname, url.port), config.database)

    def build_writer(self, config: ClickhouseSinkConfig, owner: TableOwner) -> TableWriter:
        """Return what writes the tables of a sink, not connected yet."""
        from deltaforge_dagster.sinks.clickhouse.writer import (  # noqa: PLC0415 - needs Arrow
            ClickhouseWriter,
        )

        return ClickhouseWriter(config, owner)

    def build_comparer(
        self, config: ClickhouseSinkConfig, owner: TableOwner, destination: Sequence[str]
    ) -> TableComparer:
        """Return what compares a table of a sink with the source, not connected yet."""
        from deltaforge_dagster.sinks.clickhouse.comparer import (  # noqa: PLC0415 - needs Arrow
            ClickhouseComparer,
        )

        return ClickhouseComparer(config, owner, tuple(destination))

    def preflight(
        self,
        config: ClickhouseSinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],
    ) -> list[Finding]:
        """Check the login, that the database exists, and what the user may do there."""
        from deltaforge_dagster.sinks.clickhouse.preflight import findings  # noqa: PLC0415 - client

        return findings(config, names)

    def names(
        self,
        config: ClickhouseSinkConfig,
        pipeline: str,  # noqa: ARG002
    ) -> Mapping[str, str]:
        """Return the mode of the tables, and their database."""
        return {"mode": config.mode, "database": config.database}

    def metadata(self, config: ClickhouseSinkConfig) -> Mapping[str, str]:
        """Return the mode of the tables, and where they are."""
        return {"mode": config.mode, "url": config.url, "database": config.database}


CLICKHOUSE = ClickhouseSinkType()
