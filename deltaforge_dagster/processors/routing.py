"""Where a message goes and what its keys are, by column expressions over the change frame.

For destination and key alike: what a processor set on the event comes first, then the sink's
template, then, for keys, the event id, or the primary key where the order of a row hangs on it
(`row_key`). A variable is a path into the native event. Its text is the string itself, or the JSON
text of anything else; null and missing are *unresolved*. Inside a row image, numbers with a
fraction or exponent and objects are written as Spark writes them (`1.10` is `1.1`): the same every
time, and only read here, never sent as a value. Unresolved is an error in a destination, and empty
text in a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column
from pyspark.sql.connect import functions as f

from deltaforge_dagster.config.templates import Template
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.processors.envelope import Origin

_ALWAYS = frozenset(
    {
        ("op",), ("ts_ms",), ("event_id",), ("tenant_id",),
        ("source", "version"), ("source", "connector"), ("source", "name"), ("source", "ts_ms"),
        ("source", "db"), ("source", "table"),
    }
)  # fmt: skip
"""Variables that every event resolves."""


def destination(template: Template, origin: Origin) -> Column:
    """Return the destination; null where the event leaves a variable unresolved."""
    return f.coalesce(f.nullif(f.col("topic"), f.lit("")), _text(template, origin, f.concat))


def unresolved(template: Template, origin: Origin) -> Column | None:
    """Return the path of the variable that leaves the destination null, None if none ever can."""
    conditional = [one.path for one in template.variables if one.path not in _ALWAYS]
    if not conditional:
        return None
    first, *rest = (
        f.when(_variable(path, origin).isNull(), ".".join(path)) for path in conditional
    )
    return f.coalesce(first, *rest) if rest else first


def message_key(template: Template | None, origin: Origin) -> Column:
    """Return the message key; never null."""
    if template is None:
        return f.coalesce(f.col("route_key"), f.col("event_id"))
    return f.coalesce(f.col("route_key"), _text(template, origin, _lenient_concat))


def row_key() -> Column:
    """Return the default key where the key decides the order: the row's primary key as JSON text.

    Where the table has no key, the event id. Never null.
    """
    return f.coalesce(f.col("route_key"), f.col("key"), f.col("event_id"))


def idempotency_key(origin: Origin) -> Column:
    """Return `tenant|db.table|transaction id|event id`: the same whenever the change is read."""
    return f.concat(
        f.lit(f"{origin.tenant or '_'}|"), f.col("db"), f.lit("."), f.col("table"),
        f.lit("|"), f.coalesce(f.col("tx_id"), f.lit("")), f.lit("|"), f.col("event_id"),
    )  # fmt: skip


def _lenient_concat(*parts: Column) -> Column:
    return f.concat(*(f.coalesce(part, f.lit("")) for part in parts))


def _text(template: Template, origin: Origin, concat: Callable[..., Column]) -> Column:
    parts = (
        f.lit(part) if isinstance(part, str) else _variable(part.path, origin)
        for part in template.parts
    )
    return concat(*parts)


def _variable(path: tuple[str, ...], origin: Origin) -> Column:
    """Return the text at `path` of the native event, null where it is unresolved."""
    image, *fields = path
    if image in {"before", "after", "ddl", "tags"}:
        return f.get_json_object(f.col(image), _json_path(fields)) if fields else f.col(image)
    make = _VARIABLES.get(path)
    return f.lit(None).cast("string") if make is None else make(origin)


def _json_path(fields: list[str]) -> str:
    """Return the fields in the notation of Spark's `get_json_object`."""
    path = "$"
    for name in fields:
        if not set(name) & set("['?") and name != "*":
            path += f".{name}"
        elif not set(name) & set("'?") and name != "*":
            path += f"['{name}']"
        else:
            raise SpecError(f"a template cannot name the column {name!r}: it holds ' or ? or is *")
    return path


def _plain(name: str) -> Callable[[Origin], Column]:
    return lambda _: f.col(name).cast("string")


def _streamed(name: str, connector: str) -> Callable[[Origin], Column]:
    """A position key: only this connector has it, and no snapshot row."""
    return lambda origin: f.when(
        (f.col("op") != "r") & f.lit(origin.connector == connector), f.col(name).cast("string")
    )


def _server_id(origin: Origin) -> Column:
    return f.when(f.col("op") != "r", f.lit(origin.server_id).cast("string"))


_VARIABLES: Mapping[tuple[str, ...], Callable[[Origin], Column]] = {
    ("op",): _plain("op"),
    ("ts_ms",): _plain("ts_ms"),
    ("event_id",): _plain("event_id"),
    ("tenant_id",): lambda origin: f.lit(origin.tenant),
    ("transaction", "id"): _plain("tx_id"),
    ("schema_version",): _plain("schema_version"),
    ("schema_sequence",): _plain("schema_sequence"),
    ("tx_end",): lambda _: f.when(f.col("tx_end"), "true"),
    ("source", "version"): lambda origin: f.lit(origin.version),
    ("source", "connector"): lambda origin: f.lit(origin.connector),
    ("source", "name"): lambda origin: f.lit(origin.name),
    ("source", "ts_ms"): _plain("ts_ms"),
    ("source", "db"): _plain("db"),
    ("source", "schema"): _plain("schema"),
    ("source", "table"): _plain("table"),
    ("source", "snapshot"): lambda _: f.when(f.col("op") == "r", "true"),
    ("source", "lsn"): _streamed("lsn", "postgresql"),
    ("source", "txId"): _streamed("tx_id", "postgresql"),
    ("source", "server_id"): _server_id,
    ("source", "gtid"): _streamed("tx_id", "mysql"),
    ("source", "file"): _streamed("file", "mysql"),
    ("source", "pos"): _streamed("pos", "mysql"),
}
