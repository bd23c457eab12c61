"""Maps the names of columns in rows of older table versions to their names in a commit.

The rows of a commit may have several table versions, and a column may have another name in each. In
the commit it has the name that it has in the last version. Workers import this module: it needs no
Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.tables.writer import uncertain_column
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.state.identities import dropped_name, is_certain
from deltaforge_dagster.typed_rows.rows import TypedRows
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema


@dataclass(frozen=True, slots=True)
class RowNames:
    """The names of columns in rows of one table version.

    Attributes:
        former: By name in the commit the name in these rows; only columns whose names differ.
    """

    former: Mapping[str, str]

    @property
    def hidden(self) -> frozenset[str]:
        """Names in these rows that, in the commit, can only name columns that the rows lack."""
        return frozenset(self.former.values()) - self.former.keys()

    def declared(self, types: Mapping[str, ValueType]) -> Mapping[str, ValueType]:
        """Return declared types, given by name in the commit, by name in these rows."""
        return {
            self.former.get(name, name): type_
            for name, type_ in types.items()
            if name not in self.hidden
        }

    def of_commit(self, schema: TypedSchema) -> TypedSchema:
        """Return columns of these rows with their names in the commit."""
        return replace(schema, columns=tuple(map(self._named, schema.columns)))

    def of_rows(self, schema: TypedSchema) -> TypedSchema:
        """Return columns of the commit that these rows may have, with their names in these rows."""
        columns = (
            replace(column, name=self.former.get(column.name, column.name))
            for column in schema.columns
            if column.name not in self.hidden
        )
        return replace(schema, columns=tuple(columns))

    def renamed(self, rows: TypedRows, schema: TypedSchema) -> TypedRows:
        """Return rows, of `of_rows(schema)` and then added fields, with the names in the commit.

        Raises:
            TableRejected: An added field has the name of another column.
        """
        names = {column.name for column in schema.columns}
        asked = len(schema.columns) - len(self.hidden & names)
        added = rows.schema.columns[asked:]
        for column in added:
            if column.name in names:
                raise TableRejected(
                    f"a processor adds the field {column.name}, and a column of the source has "
                    "been given this name since; let the processor use another one"
                )
        columns = [*map(self._named, rows.schema.columns[:asked]), *added]
        values = {
            column.name: values for column, values in zip(columns, rows.batch.columns, strict=True)
        }
        whole = replace(schema, columns=(*schema.columns, *added))
        arrays = [
            values[field.name] if field.name in values else pa.nulls(len(rows.batch), field.type)
            for field in whole.arrow
        ]
        current_names = self._commit_names
        return replace(
            rows,
            schema=whole,
            batch=pa.RecordBatch.from_arrays(arrays, schema=whole.arrow),
            present={current_names.get(name, name): mask for name, mask in rows.present.items()},
            misfits=tuple(
                replace(misfit, column=current_names.get(misfit.column, misfit.column))
                if misfit.column is not None
                else misfit
                for misfit in rows.misfits
            ),
        )

    def _named(self, column: TypedColumn) -> TypedColumn:
        return replace(column, name=self._commit_names.get(column.name, column.name))

    @property
    def _commit_names(self) -> Mapping[str, str]:
        return {former: name for name, former in self.former.items()}


SAME_NAMES = RowNames({})
"""The names of rows whose columns have the same names as in the commit."""


@dataclass(frozen=True, slots=True)
class CommitColumns:
    """The columns of a table of the source in a commit.

    Attributes:
        identities: By name in the commit, what identifies the column (`state.identities`).
        rows: By fingerprint of a table version, the names in its rows.
    """

    identities: Mapping[str, str]
    rows: Mapping[str, RowNames]

    def missing(self, versions: Iterable[Mapping[str, str]]) -> frozenset[str]:
        """Return the names of columns that none of these versions has.

        Each version is given as what identifies its columns, by name.
        """
        had = {identity for version in versions for identity in version.values()}
        return frozenset(name for name, identity in self.identities.items() if identity not in had)


def check_certain(versions: Sequence[Mapping[str, str]], table: str, command: str) -> None:
    """Reject a table if it is not certain which columns of its versions are the same column.

    Args:
        versions: By name of a column what identifies it, of each version that rows of the commit
            have.
        table: Name of the table, for the message.
        command: The command that has it loaded again.

    Raises:
        TableRejected: It is not certain.
    """
    for own in versions:
        for name, identity in own.items():
            if not is_certain(identity) and any(
                identity not in version.values() for version in versions
            ):
                raise uncertain_column(table, name, command)


def commit_columns(
    versions: Sequence[tuple[str, Mapping[str, str]]], history: Sequence[Mapping[str, str]]
) -> CommitColumns:
    """Return the names of a table's columns in a commit: each has its last name.

    If another column has had that name since, a dropped column gets a name of its own
    (`dropped_name`).

    Args:
        versions: The table versions of the rows, in the order of their last rows: fingerprint, and
            by name of a column what identifies it.
        history: For all versions up to the last of these, in order: what identifies the columns, by
            name.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for own in reversed(history):
        for name, identity in own.items():
            if identity not in names:
                names[identity] = dropped_name(identity) if name in taken else name
        taken.update(own)
    rows: dict[str, RowNames] = {}
    identities: dict[str, str] = {}
    for fingerprint, own in versions:
        former = {
            names[column_id]: name for name, column_id in own.items() if names[column_id] != name
        }
        rows[fingerprint] = RowNames(former) if former else SAME_NAMES
        identities |= {names[column_id]: column_id for column_id in own.values()}
    return CommitColumns(identities, rows)
