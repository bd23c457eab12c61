"""The source `turso` of a pipeline file: a Turso, libSQL or SQLite database, in a file or on a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, SecretStr, field_validator

from deltaforge_dagster.config.blocks import Block, Count, Text, resolved
from deltaforge_dagster.config.snapshot import Snapshot
from deltaforge_dagster.errors import SpecError

_TABLE_PATTERN = re.compile(r"[^.*%]+[*%]?|[*%]")
_URL = "write libsql://host, https://host or http://host:port, file:/path or a path"


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """A database in a file of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """A database on a server that speaks Hrana over HTTP.

    Attributes:
        url: `https://host:port/path`, without a slash at its end.
    """

    url: str


def database_place(url: str) -> DatabaseFile | DatabaseServer:
    """Return where a URL says that a database is.

    `libsql://` is HTTPS, or HTTP with `?tls=0`, as in Turso's own clients.

    Raises:
        SpecError: It is no such URL; the message does not repeat it, for it may hold a secret.
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() == "file":
        path = unquote(re.sub(r"^//(?:localhost)?(?=/)", "", rest)) if colon else url
        if not path.strip() or "?" in path or path.startswith("//") or path == ":memory:":
            raise SpecError(f"is no database file ({_URL})")
        return DatabaseFile(Path(path))
    scheme = scheme.lower()
    if scheme not in {"libsql", "http", "https"}:
        raise SpecError(f"is of an unknown kind ({_URL})")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise SpecError(f"is no URL ({_URL})") from None
    if parts.username or parts.password or "token" in parts.query.lower():
        raise SpecError("holds a secret: put the token into `auth_token`")
    if not host or parts.fragment or parts.query not in {"", "tls=0", "tls=1"}:
        raise SpecError(f"is no URL of a database ({_URL})")
    if scheme == "libsql":
        scheme = "http" if parts.query == "tls=0" else "https"
    elif parts.query:
        raise SpecError("has `tls`, which only libsql:// URLs have")
    name = f"[{host}]" if ":" in host else host
    place = f"{name}:{port}" if port else name
    return DatabaseServer(f"{scheme}://{place}{parts.path.rstrip('/')}")


def _pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write a name, the beginning of one with `*` or `%` behind it, or"
            " `*`; tables of SQLite have no schema)"
        )
    return text


class NativeCdc(Block):
    """What is captured of Turso's own change table."""

    level: Literal["data", "binlog"] = "data"
    """`data`: changes of rows. `binlog`: also what changes tables, as DDL events."""


class TursoConfig(Block):
    """How to read a Turso, libSQL or SQLite database."""

    id: Text
    """Names the source; part of every event id. Derived with a warning when absent: the pipeline's
    name."""
    url: Text
    """`libsql://name.turso.io`, `https://host`, `http://host:port`, `file:/path` or a path. A file is never
    made."""
    auth_token: SecretStr | None = None
    """Token of a server."""
    tables: tuple[Annotated[Text, AfterValidator(_pattern)], ...]
    """`orders`, `order_%` (or `order_*`), `*`; `[]` is every table, too. Case counts, `_` is an ordinary
    character."""
    cdc_mode: Literal["auto", "native", "triggers", "polling"] = "auto"
    """How changes are found ([turso.md](turso.md#modes)): in Turso's table `turso_cdc`, in a table that
    triggers fill, or by new rows. `auto` takes the first of these that the database has, once, and stays
    with it."""
    poll_interval_ms: Count = 1000
    """How long to wait after a look that found nothing more."""
    native_cdc: NativeCdc = NativeCdc()
    """What is captured in mode `native`."""
    native_cdc_level: Literal["id", "before", "after", "full"] = "full"
    """What the application's connections capture (`PRAGMA unstable_capture_data_changes_conn`). `id` and
    `before` have no new rows, and are refused."""
    cdc_table_name: Text = "turso_cdc"
    """Mode `native`: the change table, where the application's PRAGMA names another one."""
    tracking_column: Text = "_rowid_"
    """Mode `polling`: the rowid by any of its names, which in a table with an INTEGER PRIMARY KEY is
    that column."""
    auto_create_triggers: bool = False
    """Mode `triggers`: make the table of changes and the triggers that fill it, and make them anew when
    columns were added. `auto` then means `triggers` in a database without `turso_cdc`."""
    batch_size: Count = 1000
    """How many changes are read at a time."""
    on_schema_drift: Literal["adapt", "halt"] = "adapt"
    """What to do when `url` names another database than before and its tables differ: go on with them,
    or stop."""
    snapshot: Snapshot | None = None
    """When and how the tables' present rows are read ([snapshots.md](snapshots.md))."""

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
                f"{level} leaves new rows out of the change table, so that there is nothing to deliver"
                " (let the application capture `after` or `full`)"
            )
        return level


class TursoSource(Block):
    """A Turso, libSQL or SQLite source: its table of changes, or its new rows, read at intervals."""

    type: Literal["turso"]
    config: TursoConfig
    """How to read it."""
