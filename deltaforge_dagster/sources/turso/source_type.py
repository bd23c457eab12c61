"""Turso, libSQL and SQLite as a kind of source: its options, for a file or a server, and names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, SecretStr, field_validator

from deltaforge_dagster.config.blocks import Block, Count, Text, resolved
from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library and Arrow
    import pyarrow as pa

    from deltaforge_dagster.sources.turso.read_view import TursoReadView
    from deltaforge_dagster.sources.turso.source import TursoSource


_TABLE_PATTERN = re.compile(r"[^.*%]+[*%]?|[*%]")
_URL = "write libsql://host, https://host or http://host:port, file:/path or a path"


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """A database in a local file."""

    path: Path


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """A database on a server that speaks Hrana over HTTP.

    Attributes:
        url: `https://host:port/path`, without a trailing slash.
    """

    url: str


def database_place(url: str) -> DatabaseFile | DatabaseServer:
    """Return the file or server that a URL or path denotes.

    `libsql://` means HTTPS, or HTTP with `?tls=0`, as in Turso's own clients.

    Raises:
        SpecError: The URL is invalid; the message does not quote it, because it may contain a
            secret.
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() == "file":
        path = unquote(re.sub(r"^//(?:localhost)?(?=/)", "", rest)) if colon else url
        if not path.strip() or "?" in path or path.startswith("//") or path == ":memory:":
            raise SpecError(f"is not a database file ({_URL})")
        return DatabaseFile(Path(path))
    scheme = scheme.lower()
    if scheme not in {"libsql", "http", "https"}:
        raise SpecError(f"has an unknown scheme ({_URL})")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise SpecError(f"is not a URL ({_URL})") from None
    if parts.username or parts.password or "token" in parts.query.lower():
        raise SpecError("holds a secret: put the token into `auth_token`")
    if not host or parts.fragment or parts.query not in {"", "tls=0", "tls=1"}:
        raise SpecError(f"is not a URL of a database ({_URL})")
    if scheme == "libsql":
        scheme = "http" if parts.query == "tls=0" else "https"
    elif parts.query:
        raise SpecError("has `tls`, which only libsql:// URLs have")
    name = f"[{host}]" if ":" in host else host
    authority = f"{name}:{port}" if port else name
    return DatabaseServer(f"{scheme}://{authority}{parts.path.rstrip('/')}")


def _pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write a name, the beginning of one with `*` or `%` behind it,"
            " or `*`; tables of SQLite have no schema)"
        )
    return text


class NativeCdc(Block):
    """What is captured from Turso's own change table."""

    level: Literal["data", "binlog"] = "data"
    """`data`: changes of rows. `binlog`: also schema changes, as DDL events."""


class TursoSourceConfig(SourceConfig):
    """How to read the database."""

    url: Text
    """`libsql://name.turso.io`, `https://host`, `http://host:port`, `file:/path` or a path.

    A missing file is never created.
    """
    auth_token: SecretStr | None = None
    """Authentication token for a server."""
    tables: tuple[Annotated[Text, AfterValidator(_pattern)], ...]
    """Tables to capture: `orders`, `order_%` (or `order_*`), `*`; `[]` also means every table.
    Case-sensitive; `_` is an ordinary character.
    """
    cdc_mode: Literal["auto", "native", "triggers", "polling"] = "auto"
    """How changes are found ([turso.md](turso.md#modes)): in Turso's table `turso_cdc` (`native`),
    in a table that triggers fill (`triggers`), or as new rows (`polling`). `auto` chooses the first
    of these that the database supports, once, and keeps it.
    """
    poll_interval_ms: Count = 1000
    """How long to wait after a poll that found no more changes."""
    native_cdc: NativeCdc = NativeCdc()
    """What is captured in mode `native`."""
    native_cdc_level: Literal["id", "before", "after", "full"] = "full"
    """What the application's connections capture (`PRAGMA unstable_capture_data_changes_conn`).

    `id` and `before` lack the new rows, and are rejected.
    """
    cdc_table_name: Text = "turso_cdc"
    """Mode `native`: the change table, if the application's PRAGMA names a different one."""
    tracking_column: Text = "_rowid_"
    """Mode `polling`: the rowid, by any of its names; in a table with an INTEGER PRIMARY KEY that
    column is the rowid.
    """
    auto_create_triggers: bool = False
    """Mode `triggers`: create the change table and the triggers that fill it, and recreate the
    triggers when columns are added. `auto` then means `triggers` in a database without `turso_cdc`.
    """
    batch_size: Count = 1000
    """How many changes are read at a time."""
    on_schema_drift: OnSchemaDrift = "adapt"
    """What to do when `url` names a different database than before and its tables differ: continue
    with them, or stop.
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""

    @property
    def place(self) -> DatabaseFile | DatabaseServer:
        """Where the database is."""
        return database_place(self.url)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            database_place(url)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return url

    @field_validator("auth_token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            resolved(token.get_secret_value())
        return token

    @field_validator("native_cdc_level")
    @classmethod
    def _check_level(cls, level: str) -> str:
        if level in {"id", "before"}:
            raise ValueError(
                f"{level} leaves new rows out of the change table, so that there is nothing to"
                " deliver (let the application capture `after` or `full`)"
            )
        return level


_BYTES = replace(types.BINARY, form="text")
_AFFINITIES = (
    (("INT",), types.INT64),
    (("CHAR", "CLOB", "TEXT"), types.TEXT),
    (("BLOB",), _BYTES),
    (("REAL", "FLOA", "DOUB"), types.FLOAT64),
)
"""Types by a column's affinity ("Datatypes In SQLite", section 3.1).

In SQLite's order: the first whose words are in the declared type. A column with another affinity
(NUMERIC: `DECIMAL(10,2)`, `BOOLEAN`, `DATE`) and one without a type hold values of several types,
so they are text.
"""


def value_type(data_type: str) -> ValueType:
    """Return the type of the values in a column of a declared type."""
    upper = data_type.upper()
    return next(
        (type_ for words, type_ in _AFFINITIES if any(word in upper for word in words)), types.TEXT
    )


class TursoSourceType(SourceType[TursoSourceConfig]):
    """A database of Turso, libSQL or SQLite, whose change table or new rows are polled."""

    name = "turso"
    sample: Mapping[str, Any] = {"url": "{{ env.TURSO_URL }}", "tables": ["*"]}
    title = "Turso"
    summary = "A Turso, libSQL or SQLite source, whose change table or new rows are polled."
    config = TursoSourceConfig
    connector = "turso"
    consequences = {  # noqa: RUF012 - constant
        "url": (
            "if it is another database, a run goes on only where the last captured change is"
            " there, too"
        ),
        "cdc_mode": (
            "positions belong to a mode: a run stops where it is another one than before; `auto`"
            " stays with it"
        ),
    }

    def build(self, config: TursoSourceConfig, context: SourceContext) -> TursoSource:
        """Return a source, without connecting to the database."""
        # The client library is imported only when it is needed.
        from deltaforge_dagster.sources.turso.source import TursoSource  # noqa: PLC0415

        return TursoSource(config, context.engine.columns)

    def position(self, fields: Mapping[str, Any]) -> TursoPosition | None:
        """Return the position in these fields; None if there is no `mode`."""
        return TursoPosition.from_fields(fields)

    def position_fields(
        self,
        config: TursoSourceConfig,  # noqa: ARG002
    ) -> tuple[PositionField, ...]:
        """Return the field `sequence`."""
        return (PositionField("sequence", "pos", "quoted number"),)

    def read_view(self, fields: Mapping[str, Any]) -> TursoReadView | None:
        """Return the read view in these fields; None if there is no `mode`."""
        # Arrow is imported only when it is needed.
        from deltaforge_dagster.sources.turso.read_view import TursoReadView  # noqa: PLC0415

        return TursoReadView.from_fields(fields)

    def value_type(self, column: Column, options: ValueOptions) -> ValueType:  # noqa: ARG002
        """Return the type by its name."""
        return value_type(column.data_type)

    def position_number(self, position: Position) -> int:
        """Return the newest change's number; in mode `polling` the sum of those of all tables."""
        assert isinstance(position, TursoPosition)
        return (position.last_change_id or 0) + sum(
            max(0, at) for _, at in position.table_positions
        )

    def rows_until(self, rows: pa.RecordBatch, end: Position) -> int:
        """Return how many of these rows have numbers up to that of `end`."""
        import numpy as np  # noqa: PLC0415 - slow to import

        assert isinstance(end, TursoPosition)
        return int(np.count_nonzero(rows.column("pos").to_numpy() <= (end.last_change_id or 0)))

    def table_variables(self, pattern: str) -> Mapping[str, str]:
        """Return the variables for the table, and for the database, which is always `main`."""
        return {"source.db": "main", "source.table": pattern}

    def kept_log(self, config: TursoSourceConfig, size: int | None) -> str | None:  # noqa: ARG002
        """Return the clause that our triggers still fill the change table; None without them."""
        if not config.auto_create_triggers:
            return None
        from deltaforge_dagster.sources.turso.triggers import TABLE  # noqa: PLC0415 - Arrow

        (database,) = self.database_place(config)
        return f"triggers still write every change into table {TABLE} of {database}"

    def masked(self, config: TursoSourceConfig) -> bool:
        """Return whether the token is masked."""
        return config.auth_token is not None

    def with_secret(self, config: TursoSourceConfig, secret: str | None) -> TursoSourceConfig:
        """Return a config with this token."""
        return config.model_copy(
            update={"auth_token": None if secret is None else SecretStr(secret)}
        )

    def names(self, config: TursoSourceConfig, pipeline: str) -> Mapping[str, str]:  # noqa: ARG002
        """Return the mode, and the name of the change table if we create it."""
        if not config.auto_create_triggers:
            return {"mode": config.cdc_mode}
        from deltaforge_dagster.sources.turso.triggers import TABLE  # noqa: PLC0415 - Arrow

        return {"mode": config.cdc_mode, "table": TABLE}

    def database_place(self, config: TursoSourceConfig) -> tuple[str, ...]:
        """Return the file or the server."""
        location = config.place
        return (
            str(location.path.absolute()) if isinstance(location, DatabaseFile) else location.url,
        )

    def owned(self, config: TursoSourceConfig) -> Sequence[OwnedResource]:
        """Return the change table that triggers fill: what was captured is deleted from it."""
        if config.cdc_mode != "triggers" and not config.auto_create_triggers:
            return ()
        resource = "the change table that triggers fill in"
        (url,) = self.database_place(config)
        return [OwnedResource(resource, (), url, "spec.source.config.url")]


TURSO = TursoSourceType()
