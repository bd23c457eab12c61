"""The `turso` source of a pipeline file: Turso, libSQL or SQLite, in a file or on a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, SecretStr, field_validator

from deltaforge_dagster.config.blocks import Block, Count, Text, resolved
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig
from deltaforge_dagster.errors import SpecError

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
