"""Whether one Avro schema can read what another has written.

The rules are those of the Apache Avro Specification, "Schema Resolution".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Schema: TypeAlias = Any

_PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_PROMOTED = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
"""For each type, the other types as which its values can be read."""


class InvalidSchemaError(ValueError):
    """Text that is no Avro schema."""


@dataclass(slots=True)
class _NamedTypes:
    """The named types of a schema, by their full names."""

    known: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def resolved(self, schema: Schema) -> Schema:
        """Return the definition of a named type, and any other schema as it is."""
        while isinstance(schema, str) and schema in self.known:
            schema = self.known[schema]
        return schema


def parse(schema: Schema) -> tuple[Schema, _NamedTypes]:
    """Return a schema with full names, and its named types.

    Raises:
        InvalidSchemaError: It is no schema.
    """
    names = _NamedTypes()
    return _parsed(schema, "", names), names


def problems(reader: Schema, writer: Schema) -> list[str]:
    """Return why the first schema cannot read what the second has written; empty if it can."""
    (new, new_names), (old, old_names) = parse(reader), parse(writer)
    return list(_Check(new_names, old_names).mismatches(new, old, ""))


def _parsed(  # noqa: C901, PLR0911 - one case per kind of schema
    schema: Schema, namespace: str, names: _NamedTypes
) -> Schema:
    if isinstance(schema, list):
        return [_parsed(branch, namespace, names) for branch in schema]
    if isinstance(schema, str):
        if schema in _PRIMITIVES:
            return schema
        full = schema if "." in schema else f"{namespace}.{schema}".lstrip(".")
        if full not in names.known:
            raise InvalidSchemaError(f"{schema} is not defined")
        return full
    if not isinstance(schema, dict) or "type" not in schema:
        raise InvalidSchemaError(f"{schema!r} is no schema")
    kind = schema["type"]
    if isinstance(kind, dict | list) or kind in _PRIMITIVES:
        return _parsed(kind, namespace, names)
    if kind == "array":
        return {"type": kind, "items": _parsed(schema["items"], namespace, names)}
    if kind == "map":
        return {"type": kind, "values": _parsed(schema["values"], namespace, names)}
    if kind not in {"record", "enum", "fixed"}:
        return _parsed(kind, namespace, names)
    name, space = schema.get("name", ""), schema.get("namespace", namespace)
    full = name if "." in name else f"{space}.{name}".lstrip(".")
    if not name or full in names.known:
        raise InvalidSchemaError(f"{full!r} is no name, or is defined twice")
    definition = {**schema, "full": full}
    names.known[full] = definition
    if kind == "record":
        inner = full.rpartition(".")[0]
        definition["fields"] = [
            {**member, "type": _parsed(member["type"], inner, names)} for member in schema["fields"]
        ]
        field_names = [member["name"] for member in definition["fields"]]
        if len(set(field_names)) < len(field_names):
            raise InvalidSchemaError(f"{full} has a field twice")
    return definition


@dataclass(slots=True)
class _Check:
    new: _NamedTypes
    old: _NamedTypes
    seen: set[tuple[str, str]] = field(default_factory=set)

    def mismatches(self, reader: Schema, writer: Schema, where: str) -> Iterator[str]:
        reader, writer = self.new.resolved(reader), self.old.resolved(writer)
        if isinstance(writer, list):
            for branch in writer:
                yield from self.mismatches(reader, branch, where)
            return
        if isinstance(reader, list):
            if all(list(self.mismatches(branch, writer, where)) for branch in reader):
                yield f"{where or '/'}: the reader's union has no {_kind(writer)}"
            return
        kinds = _kind(reader), _kind(writer)
        if kinds[0] != kinds[1]:
            if kinds[0] not in _PROMOTED.get(kinds[1], ()):
                yield f"{where or '/'}: {kinds[1]} cannot be read as {kinds[0]}"
            return
        match kinds[0]:
            case "array":
                yield from self.mismatches(reader["items"], writer["items"], f"{where}/items")
            case "map":
                yield from self.mismatches(reader["values"], writer["values"], f"{where}/values")
            case "record" | "enum" | "fixed":
                yield from self._named(reader, writer, where)

    def _named(self, reader: Schema, writer: Schema, where: str) -> Iterator[str]:
        pair = reader["full"], writer["full"]
        if pair in self.seen:
            return
        self.seen.add(pair)
        if reader["name"].rpartition(".")[2] != writer["name"].rpartition(".")[2]:
            yield f"{where or '/'}: {writer['full']} cannot be read as {reader['full']}"
            return
        if reader["type"] == "enum":
            gone = set(writer["symbols"]) - set(reader["symbols"])
            if gone and "default" not in reader:
                yield f"{where or '/'}: the reader has no symbols {sorted(gone)}"
        elif reader["type"] == "fixed":
            if reader["size"] != writer["size"]:
                yield f"{where or '/'}: the sizes differ"
        else:
            written = {member["name"]: member for member in writer["fields"]}
            for member in reader["fields"]:
                path = f"{where}/{member['name']}"
                if member["name"] in written:
                    old = written[member["name"]]["type"]
                    yield from self.mismatches(member["type"], old, path)
                elif "default" not in member:
                    yield f"{path}: the reader's field has no default and was not written"


def _kind(schema: Schema) -> str:
    return schema if isinstance(schema, str) else str(schema["type"])
