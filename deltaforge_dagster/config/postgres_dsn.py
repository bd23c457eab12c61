"""Connection strings of PostgreSQL, as sources and sinks have them."""

from __future__ import annotations

import re

from pydantic import SecretStr

from deltaforge_dagster.config.blocks import resolved
from deltaforge_dagster.config.owned import server_place
from deltaforge_dagster.config.secrets import check_encoded
from deltaforge_dagster.errors import SpecError

DSN_DEFAULTS = {"host": "localhost", "port": "5432", "user": "postgres", "dbname": "postgres"}
"""Defaults of a `key=value` connection string."""

_PAIR = re.compile(
    r"(?sa)\s*(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|(?:\\.|[^\s'\\])(?:\\.|[^\s\\])*|)(?=\s|\Z)"
)


def checked_dsn(dsn: SecretStr) -> SecretStr:
    """Return the connection string of a field in the form that libpq accepts; a validator.

    Raises:
        ValueError: It is not a connection string. The message does not quote it.
    """
    text = resolved(dsn.get_secret_value())
    try:
        return SecretStr(postgres_dsn(text)[0])
    except SpecError as error:
        raise ValueError(str(error)) from None


def postgres_dsn(text: str) -> tuple[str, tuple[str, ...]]:
    """Return `text` as a connection string that libpq accepts, and the names of ignored keys.

    Both forms of the manual ("Connection Strings") are accepted: a URL, and `key=value` pairs. In
    the second form, `database` is a synonym for `dbname`, missing keys have fixed defaults (libpq
    would use environment variables and the operating system's user), and keys that libpq does not
    know are ignored.

    Raises:
        SpecError: The text has neither form. The message does not quote the text.
    """
    import psycopg  # noqa: PLC0415 - the client library
    from psycopg import conninfo  # noqa: PLC0415

    ignored: tuple[str, ...] = ()
    if not text.startswith(("postgres://", "postgresql://")):
        text, ignored = _from_pairs(text)
    else:
        check_encoded(text)
    try:
        conninfo.conninfo_to_dict(text)
    except psycopg.ProgrammingError:
        valid = False  # libpq's message quotes the text, including the password
    else:
        valid = True
    if not valid:
        raise SpecError(_NO_DSN)
    return text, ignored


def postgres_place(dsn: SecretStr) -> tuple[str, str]:
    """Return the server, as a place (`config.owned`), and the database of a connection string."""
    from psycopg import conninfo  # noqa: PLC0415 - the client library

    parameters = conninfo.conninfo_to_dict(dsn.get_secret_value())
    default = DSN_DEFAULTS
    names = str(parameters.get("host") or parameters.get("hostaddr") or default["host"]).split(",")
    ports = str(parameters.get("port") or default["port"]).split(",")
    ports *= len(names) if len(ports) == 1 else 1
    servers = sorted(server_place(*address) for address in zip(names, ports, strict=False))
    database = parameters.get("dbname") or default["dbname"]
    return ",".join(servers), str(database)


_NO_DSN = (
    "is not a PostgreSQL connection string (write postgres://user:password@host:port/database, "
    "with special characters of the password percent-encoded, or host=... user=... password=...)"
)


def _from_pairs(text: str) -> tuple[str, tuple[str, ...]]:
    from psycopg import conninfo, pq  # noqa: PLC0415 - the client library

    keywords = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    kept = dict(DSN_DEFAULTS)
    ignored: list[str] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        pair = _PAIR.match(text, at)
        if pair is None:
            raise SpecError(_NO_DSN)
        key = "dbname" if pair[1] == "database" else pair[1]
        if key in keywords:
            value = pair[2][1:-1] if pair[2].startswith("'") else pair[2]
            kept[key] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        else:
            ignored.append(pair[1])
        at = pair.end()
    if kept == DSN_DEFAULTS and end == 0:
        raise SpecError(_NO_DSN)
    return conninfo.make_conninfo("", **kept), tuple(ignored)
