"""The `mysql` source of a pipeline file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, cast, get_args
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
from deltaforge_dagster.config.globs import overlap, table_parts
from deltaforge_dagster.config.secrets import NOT_ENCODED, check_encoded, mask
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig, TablePattern
from deltaforge_dagster.errors import SpecError


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
