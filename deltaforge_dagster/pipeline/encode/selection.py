"""Select the messages of one sink from encoded rows.

Encoded files hold the messages of all sinks of a pipeline; the `Route` of a sink names its columns
and rows. A change is *refused* if one of its messages cannot be made: its destination has no value,
it is larger than any message can be, or a value does not fit its type in Avro. No message of a
refused change is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.pipeline.encode.messages import Route
from deltaforge_dagster.sinks.base import AVRO_MESSAGES, MESSAGES


class EmptyKeys:
    """Warns about variables that are empty text in keys, once for each key and variable.

    Args:
        warn: Called with each warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    def inspect(self, rows: pa.RecordBatch, route: Route, sink_id: str) -> None:
        """Check rows that will be sent to a sink."""
        if route.empty is None or route.key is None:
            return
        column = rows.column(route.empty)
        if column.null_count == len(column):
            return
        empty = cast("list[str]", column.drop_null().unique().to_pylist())
        for path in dict.fromkeys(path for paths in empty for path in paths.splitlines()):
            if (route.key.text, path) not in self._warned:
                self._warned.add((route.key.text, path))
                self._warn(
                    f"sink {sink_id}: ${{{path}}} in the key {route.key.text!r} has no value for "
                    "some events and is empty text there; ${key.<column>} has a value for every "
                    "change of a row with a primary key"
                )


def select_messages(
    rows: pa.RecordBatch, route: Route, sink_id: str, segment: int, empty_keys: EmptyKeys
) -> tuple[pa.RecordBatch, list[Undeliverable]]:
    """Return the messages of one sink, and an error for each refused change.

    Args:
        rows: Encoded rows of one segment, with the columns of the plan that the route belongs to.
        route: Columns and rows of the sink.
        sink_id: Sink, for errors.
        segment: Segment number, for errors.
        empty_keys: Checks the keys of the selected messages.

    Returns:
        The messages, with the columns of `MESSAGES` or `AVRO_MESSAGES` (views of `rows` if all of
        them are selected),
        and the errors in the order of their ordinals.
    """
    others = ("unmade", route.unresolved, route.empty)
    names = [name for name in (*route.columns.values(), *others) if name]
    if route.selected is not None and not pc.all(chosen := rows.column(route.selected)).as_py():
        rows = rows.select(list(dict.fromkeys(names))).filter(chosen)
    refused = _refused(rows, route, sink_id, segment)
    if refused:
        ordinals = np.array([error.ordinal for error in refused])
        rest = ~np.isin(rows.column("ordinal").to_numpy(), ordinals)
        rows = rows.filter(pa.array(rest))
    empty_keys.inspect(rows, route, sink_id)
    form = MESSAGES if route.schemas is None else AVRO_MESSAGES
    columns = [_column(rows, route, name) for name in form.names]
    return pa.RecordBatch.from_arrays(columns, schema=form), refused


def _column(rows: pa.RecordBatch, route: Route, name: str) -> pa.Array[Any]:
    """Return a column of messages, all null if the route does not have it."""
    if route.schemas is not None and name in {"value", "schema"}:
        return _avro_column(rows, route, name)
    own = route.columns.get(name)
    return pa.nulls(rows.num_rows, pa.string()) if own is None else rows.column(own)


def _avro_column(rows: pa.RecordBatch, route: Route, name: str) -> pa.Array[Any]:
    """Return a column of messages in Avro."""
    part: pa.Array[Any] = pc.struct_field(rows.column(route.columns["value"]), name)
    return part


def _refused(rows: pa.RecordBatch, route: Route, sink_id: str, segment: int) -> list[Undeliverable]:
    destination, unmade = rows.column(route.columns["destination"]), rows.column("unmade")
    errors: dict[int, Undeliverable] = {}

    def refuse(row: int, problem: str, advice: str, cause: str) -> None:
        ordinal = cast("int", rows.column("ordinal")[row].as_py())
        event = f"the event at segment {segment}, ordinal {ordinal}"
        text = f"sink {sink_id}: {problem} {event}; {advice}"
        errors.setdefault(ordinal, Undeliverable(text, ordinal, cause))

    if unmade.null_count < len(unmade):
        for row in np.flatnonzero(unmade.is_valid()).tolist():
            if not set(route.columns.values()).isdisjoint(unmade[row].as_py().split()):
                problem = "no message of 2 GiB or more can be made of"
                refuse(row, problem, "leave out what makes it so large", "too_large")
    if route.schemas is not None:
        unfit = _avro_column(rows, route, "unfit")
        for row in np.flatnonzero(unfit.is_valid()).tolist():
            advice = f"{unfit[row].as_py()}; leave the column out (engine.columns), or send JSON"
            refuse(row, "no message in Avro can be made of", advice, "serialization")
    if destination.null_count and route.unresolved is not None:
        for row in np.flatnonzero(destination.is_null()).tolist():
            problem = (
                f"${{{rows.column(route.unresolved)[row].as_py()}}} in {route.template.text!r} has"
            )
            refuse(row, f"{problem} no value for", "use a variable that every event has", "routing")
    return sorted(errors.values(), key=lambda error: error.ordinal)
