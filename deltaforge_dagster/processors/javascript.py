"""The `javascript` processor: a user's script over batches of the change frame.

The script gets native events and returns events (`v8`). This module converts a batch to JSON
for the script, and the script's result back to a change frame: each row is copied from the row that
it comes from, and only the columns that differ are replaced. So a row keeps its log position, its
transaction and its key, whatever the script does to its images. `before`, `after`, `tags`, `op`,
`ts_ms`, the names in `source`, `synthetic` and routes are read back; changes of other keys of an
event are lost.

An event without an id, or with an id that is not in the batch, is new: it gets the log position of
the event before it. The chain assigns ids to rows whose ids are missing or repeated.

`1.10`, `2e3` and `12345678901234567890` are valid JSON, but a program that reads them as doubles
and writes them again changes them to `1.1`, `2000` and `12345678901234567000`. So
`has_unusual_numbers` checks whether the spelling of an image's numbers has to be preserved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.kernels.json_fields import string_end
from deltaforge_dagster.kernels.message_text import layout
from deltaforge_dagster.kernels.runtime import MINUS, QUOTE, Bytes, kernel
from deltaforge_dagster.processors.base import replaced
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope
from deltaforge_dagster.processors.v8 import CallLimits, Script

_OPS = frozenset("cudrt")
_NAMES = ("db", "schema", "table")
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_MAX_TS_MS = (1 << 63) // 1000 - 1  # its microseconds still fit into 64 bits


class JavaScript:
    """One `javascript` processor; used by one thread.

    Args:
        name: Its id.
        source: The script.
        limits: The limits of each call.
        origin: The constant source fields of every event.

    Raises:
        SpecError: The script is invalid.
    """

    def __init__(self, name: str, source: str, limits: CallLimits, origin: EventOrigin) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name
        self._origin = origin
        self._script = Script(name, source, limits)

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the result of one call of the script with a batch of the change frame.

        Raises:
            ProcessorFailed: The script failed, reached a limit, or returned something other than
                events.
        """
        if not frame.num_rows:
            return frame
        text, unusual = self._events(frame)
        answer = self._script.call(text, spelled=unusual)
        return (
            frame if answer is None else _Rebuilt(self._name, frame, orjson.loads(answer)).frame()
        )

    def close(self) -> None:
        """Close the script's engine. Safe to call twice."""
        self._script.close()

    def _events(self, frame: pa.RecordBatch) -> tuple[str, bool]:
        """Return a batch as a JSON array, and whether JavaScript may respell its numbers."""
        raw = frame.schema.get_field_index("raw_payload")
        none = pa.array(np.zeros(frame.num_rows, np.bool_))
        whole = frame.set_column(raw, frame.schema.field(raw), none)
        events = cast("list[str]", native_envelope(self._origin, whole).to_pylist())
        images = (frame.column(image) for image in ("before", "after"))
        return f"[{','.join(events)}]", any(has_unusual_numbers(column) for column in images)


@dataclass(slots=True)
class _Rebuilt:
    """Builds a change frame from the result of a script.

    Attributes:
        name: Id of the processor.
        given: The batch that the script got.
        told: For each event the number of the row that it comes from, or -1, and the differences.
    """

    name: str
    given: pa.RecordBatch
    told: Sequence[tuple[int, dict[str, Any]]]
    _changes: dict[str, dict[int, Any]] = field(default_factory=dict)

    def frame(self) -> pa.RecordBatch:
        """Return the frame: a row for each event of the result, in that order."""
        sources = np.empty(len(self.told), np.int64)
        last = 0
        for row, (number, differs) in enumerate(self.told):
            if number < 0:
                self._set_created(row, differs)
            else:
                last = number
                self._set_changed(row, differs)
            sources[row] = last
        return replaced(self.given.take(pa.array(sources, pa.int64())), self._changes)

    def _set_changed(self, row: int, differs: dict[str, Any]) -> None:
        for name, value in differs.items():
            if name == "route":
                self._set_route(row, value)
            elif name == "synthetic":
                self._set_synthetic(row, value)
            else:
                self._set(row, *self._column(name, value))

    def _column(self, name: str, value: Any) -> tuple[str, Any]:
        """Return the column of an event's field, and the value to store in it."""
        if name in {"before", "after"}:
            return name, None if value == "null" else value
        if name == "tags":
            tags = orjson.loads(value)
            if tags is None or (
                isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
            ):
                return name, None if tags is None else value
            raise self._refused("`tags` that are not a list of strings")
        if name == "op":
            if value in _OPS:
                return name, value
            raise self._refused("an `op` other than c, u, d, r and t")
        if name == "ts_ms":
            if type(value) in {int, float} and int(value) == value and abs(value) <= _MAX_TS_MS:
                return "ts_us", int(value) * 1000
            raise self._refused("a `ts_ms` that is not an integer")
        if isinstance(value, str) or (value is None and name == "schema"):
            return name, value
        raise self._refused(f"no text as `source.{name}`")

    def _set_route(self, row: int, route: Any) -> None:
        """Replace the route of a row; for what the route omits, the sink's settings apply."""
        if not isinstance(route, dict):
            raise self._refused("a route that is not an object")
        texts = {name: route.get(name) for name in ("topic", "key")}
        for name, value in texts.items():
            if value is not None and not isinstance(value, str | int | float):
                raise self._refused(f"a route whose `{name}` is not a string")
        headers = route.get("headers")
        if headers is not None:
            if not isinstance(headers, dict) or not all(
                isinstance(header, str | int | float) for header in headers.values()
            ):
                raise self._refused("a route whose `headers` are not texts by name")
            headers = orjson.dumps(
                {header: _text(value) for header, value in headers.items()}
            ).decode()
        self._set(row, "topic", _text(texts["topic"]))
        self._set(row, "route_key", _text(texts["key"]))
        self._set(row, "headers", headers or None)
        self._set(row, "raw_payload", value=False)

    def _set_synthetic(self, row: int, maker: Any) -> None:
        """Set `synthetic`, the producer of an event, to the value that the script chose."""
        if maker is not None and not (isinstance(maker, str) and maker):
            raise self._refused("a `synthetic` that is not a string")
        self._set(row, "synthetic", maker)

    def _set_created(self, row: int, differs: dict[str, Any]) -> None:
        """Set the columns of an event that the script created."""
        event = differs["event"]
        source = event.get("source")
        if not isinstance(source, dict) or not {"op", "ts_ms"} <= event.keys():
            raise ProcessorFailed(
                f"processor {self.name}: failed to decode events from JS: a new event needs `op`, "
                "`ts_ms` and `source` (copy an event that was given: {...event})"
            )
        for name in ("before", "after"):
            value = event.get(name)
            self._set(row, name, None if value is None else orjson.dumps(value).decode())
        tags = event.get("tags")
        self._set(row, *self._column("tags", orjson.dumps(tags).decode()))
        self._set(row, *self._column("op", event["op"]))
        self._set(row, *self._column("ts_ms", event["ts_ms"]))
        for name in _NAMES:
            self._set(row, *self._column(name, source.get(name)))
        self._set_route(row, differs.get("route") or {})
        self._set_synthetic(row, event.get("synthetic"))
        own = event.get("event_id")
        if own is not None and not (isinstance(own, str) and _UUID.fullmatch(own)):
            raise self._refused("an `event_id` that is not a UUID")
        self._set(row, "event_id", own)
        for name in ("key", "ddl", "schema_version", "schema_sequence"):
            self._set(row, name, None)

    def _set(self, row: int, column: str, value: Any) -> None:
        self._changes.setdefault(column, {})[row] = value

    def _refused(self, problem: str) -> ProcessorFailed:
        return ProcessorFailed(f"processor {self.name}: the script returned {problem}")


def _text(value: Any) -> str | None:
    """Return a scalar as text: a string as it is, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


_SAFE_DIGITS = 15
"""Every integer of up to this many digits is exact as a double (IEEE 754: 53 bits)."""


def has_unusual_numbers(documents: pa.Array[pa.Scalar[pa.DataType]]) -> bool:
    """Return whether a number in JSON texts is anything but an integer of at most 15 digits.

    Args:
        documents: A column of valid JSON texts; null has no numbers.
    """
    if documents.null_count == len(documents):
        return False
    ends, data = layout(cast("pa.StringArray", documents))
    return bool(_unusual(data, ends))


# A number (RFC 8259, section 6) begins with `-` or a digit outside a string:
#
#   [-] digits [. digits] [e|E [+|-] digits]


@kernel
def _unusual(source: Bytes, ends: npt.NDArray[np.int32]) -> bool:
    for row in range(len(ends) - 1):
        at, stop = int(ends[row]), int(ends[row + 1])
        while at < stop:
            byte = source[at]
            if byte == QUOTE:
                at = string_end(source, at, stop)
                continue
            if byte != MINUS and (byte < 48 or byte > 57):
                at += 1
                continue
            start = at
            if byte == MINUS:
                at += 1
            digits = at
            while at < stop and 48 <= source[at] <= 57:
                at += 1
            if at - digits > _SAFE_DIGITS or (byte == MINUS and source[digits] == 48):
                return True
            if at < stop and (source[at] == 46 or source[at] == 101 or source[at] == 69):  # . e E
                return True
            at = max(at, start + 1)
    return False
