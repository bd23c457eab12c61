"""What sensing has learned about one table: the schemas of its documents, and its drift.

A row of a registered table version is compared with the version's columns, and each column that may
contain JSON documents has a schema. Any other row, which comes from a processor or a logical
message, is itself a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.config.sensing import Sampling, SchemaSensing, Selection
from deltaforge_dagster.kernels.characters import OPEN_BRACE, OPEN_BRACKET
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.sensing.drift import Declared, Drift
from deltaforge_dagster.sensing.groups import Flags, coded
from deltaforge_dagster.sensing.scan import NULL, OBJECT, ROOT, STRING, Cells, child, scan
from deltaforge_dagster.sensing.schema import DocumentSchema

UNCHANGED = '{"_unchanged":true}'
"""How row images represent a value that the log does not have."""

_READ = ("after", "ts_us", "schema_version", "headers")

Versions = Mapping[str, Sequence[Declared]]
"""The columns of each version of a table, by fingerprint."""

_DOCUMENT, _UNKNOWN = -1, -2

_OF_OUTBOX = '"df-source-kind":"outbox"'
"""Marks, in the headers, an event that the outbox processor made from a row; it is no row any
more."""


class TableSense:
    """What sensing has learned about one table.

    Args:
        options: The pipeline's `schema_sensing`.

    Attributes:
        events: The number of inserts, updates and snapshot rows.
        whole: The schema of rows that are themselves documents; None before the first such row.
        columns: The schemas of columns that contain documents, by name.
        drift: The differences between rows and the table's columns.
    """

    def __init__(self, options: SchemaSensing) -> None:
        self._options = options
        self.events = 0
        self.whole: DocumentSchema | None = None
        self.columns: dict[str, DocumentSchema] = {}
        self.drift = Drift()

    @property
    def schemas(self) -> list[DocumentSchema]:
        """All schemas."""
        return [*([self.whole] if self.whole else []), *self.columns.values()]

    def accept(self, batch: pa.RecordBatch, rows: Longs, versions: Versions) -> None:
        """Learn from the table's next inserts, updates and snapshot rows, in log order.

        Args:
            batch: A batch with the columns `after`, `ts_us`, `schema_version` and `headers`.
            rows: The indexes of the table's rows in the batch.
            versions: The registered versions of the table; empty if there are none.
        """
        picked = rows[chosen(self._options.sampling, self.events, len(rows))]
        self.events += len(rows)
        inspected = batch.select(list(_READ)).take(picked)
        inspected = inspected.filter(inspected.column("after").is_valid())
        if not inspected.num_rows:
            return
        numbers, fingerprints = _versions(inspected, versions)
        self._take_whole(inspected.filter(pa.array(numbers == _DOCUMENT)))
        ours = inspected.filter(pa.array(numbers >= 0))
        numbers = numbers[numbers >= 0]
        starts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, stop in pairwise([0, *starts.tolist(), len(numbers)]):
            if start < stop:
                version = fingerprints[int(numbers[start])]
                self._take_rows(ours.slice(start, stop - start), version, versions[version])

    def _take_whole(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self.whole = self.whole or DocumentSchema(self._options)
            self.whole.observe(_images(rows), rows.column("ts_us").to_numpy())

    def _take_rows(self, rows: pa.RecordBatch, version: str, columns: Sequence[Declared]) -> None:
        times = rows.column("ts_us").to_numpy()
        cells = scan(_images(rows), 1)
        differing = self.drift.compare(cells, columns, version, times)
        if self._options.deep_inspect.enabled:
            chosen_columns = self._options.deep_inspect.columns
            for column in columns:
                if column.document and selected(chosen_columns, column.name):
                    differing |= self._take_column(column, cells, times)
        self.drift.analyzed += rows.num_rows
        self.drift.drifted += int(differing.sum())

    def _take_column(self, column: Declared, cells: Cells, times: Longs) -> Flags:
        """Observe the documents of a column; return a mask of the rows whose document differs."""
        differing = np.zeros(cells.documents, np.bool_)
        document_cells, documents = _documents(column, cells)
        if not len(document_cells):
            return differing
        schema = self.columns.get(column.name)
        if schema is None:
            schema = self.columns[column.name] = DocumentSchema(self._options)
        rows = cells.document[document_cells]
        unlike = schema.observe(documents, times[rows])
        if unlike.any():
            differing[rows[unlike]] = True
            self.drift.note(
                column.name,
                "json_structure_change",
                observed="object",
                count=int(unlike.sum()),
                last_us=int(times[rows[unlike]].max()),
            )
        return differing

    def state(self) -> bytes:
        """Return the state for `restored`, as JSON text."""
        return orjson.dumps(
            {
                "events": self.events,
                "whole": None if self.whole is None else self.whole.state(),
                "columns": {name: schema.state() for name, schema in self.columns.items()},
                "drift": self.drift.state(),
            }
        )

    @classmethod
    def restored(cls, options: SchemaSensing, state: bytes) -> TableSense:
        """Return the table with a state that `state` returned."""
        fields: dict[str, Any] = orjson.loads(state)
        table = cls(options)
        table.events = fields["events"]
        if fields["whole"] is not None:
            table.whole = DocumentSchema.restored(options, fields["whole"])
        for name, schema in fields["columns"].items():
            table.columns[name] = DocumentSchema.restored(options, schema)
        table.drift = Drift.restored(fields["drift"])
        return table


def selected(selection: Selection, name: str) -> bool:
    """Return whether a selection includes a name; without `include` patterns it includes all."""
    included = not selection.include or Globs(selection.include).match([name])
    return included and not Globs(selection.exclude).match([name])


def _images(rows: pa.RecordBatch) -> pa.StringArray:
    return cast("pa.StringArray", rows.column("after"))


def _versions(rows: pa.RecordBatch, versions: Versions) -> tuple[Longs, list[str]]:
    """Return for each row the index of its table version, and the fingerprints of the versions.

    The index is `_DOCUMENT` for a row that is not a row of the table, and `_UNKNOWN` for a row of a
    version that is not registered, which is not inspected.
    """
    codes, names = coded(rows, "schema_version")
    if not versions:
        return np.full(rows.num_rows, _DOCUMENT), []
    fingerprints = list(versions)
    numbers = np.array(
        [
            _DOCUMENT
            if name is None
            else fingerprints.index(name)
            if name in versions
            else _UNKNOWN
            for name in names
        ],
        np.int64,
    )[codes]
    headers = rows.column("headers")
    if headers.null_count < len(headers):
        from_outbox = pc.match_substring(cast("pa.StringArray", headers), _OF_OUTBOX).fill_null(
            False
        )
        numbers[from_outbox.to_numpy(zero_copy_only=False)] = _DOCUMENT
    return numbers, fingerprints


def _documents(column: Declared, cells: Cells) -> tuple[Longs, pa.StringArray]:
    """Return the cells of a column that are documents, and their texts.

    In a column of a JSON type, every value except null is a document. In a text column, and for
    strings in any column, a document is an object or an array that is written as text.
    """
    candidates = np.flatnonzero(cells.path == child(ROOT, "." + column.name))
    kinds, starts = cells.type[candidates], cells.start[candidates]
    strings = kinds == STRING
    within = cells.data[np.minimum(starts + 1, len(cells.data) - 1)]
    holding = strings & ((within == OPEN_BRACE) | (within == OPEN_BRACKET))
    if OBJECT in column.kinds:
        kept = kinds != NULL
        for index in np.flatnonzero(
            (kinds == OBJECT) & (cells.stop[candidates] - starts == len(UNCHANGED))
        ).tolist():
            kept[index] = cells.text(int(candidates[index])) != UNCHANGED
    else:
        kept = holding.copy()
    documents = cells.texts(candidates[kept])
    if not (holding & kept).any():
        return candidates[kept], documents
    texts: list[str | None] = documents.to_pylist()
    for index in np.flatnonzero(holding[kept]).tolist():
        written = _inner(str(texts[index]))
        if written is not None or OBJECT not in column.kinds:
            texts[index] = written
    valid = np.array([text is not None for text in texts], np.bool_)
    return candidates[kept][valid], pa.array(
        [text for text in texts if text is not None], pa.string()
    )


def _inner(text: str) -> str | None:
    """Return the object or array that a JSON string contains as text, None for any other string."""
    try:
        inner: str = orjson.loads(text)
        return inner if isinstance(orjson.loads(inner), dict | list) else None
    except ValueError:
        return None


def chosen(sampling: Sampling, seen: int, events: int) -> Longs:
    """Return the indexes of the next events of a table that are inspected, counted from 0.

    All events of the warm-up are inspected, then a sample.

    Args:
        sampling: The sampling options.
        seen: The number of earlier events.
        events: The number of next events.
    """
    warm = min(max(sampling.warmup_events - seen, 0), events)
    rate = max(sampling.sample_rate, 1)
    behind = seen + warm - sampling.warmup_events
    later = np.arange(warm + -behind % rate, events, rate, dtype=np.int64)
    return np.concatenate([np.arange(warm, dtype=np.int64), later])
