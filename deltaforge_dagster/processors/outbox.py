"""The `outbox` processor turns outbox rows and outbox messages into the events that they contain.

A source marks what it reads from an outbox with the schema `__outbox`. Such an insert ::

    {"id":7,"aggregate_type":"Order","aggregate_id":"1","event_type":"OrderCreated","payload":{...}}

becomes an event whose `after` is the payload, with the aggregate's id as its key, the template's
topic (or the row's, or the default) and the other columns as headers. All other events pass
unchanged and in order. An outbox event that is not an insert, or whose image is not an object, is
dropped, logged as a warning and counted, because an outbox is insert-only.

A text payload is treated as JSON if it is valid JSON, otherwise as a string. `raw_payload` sends
exactly that text: `after` holds it unchanged, or as a JSON string, whose quotes the envelope
removes (`processors.messages.envelope`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.config.processors import OutboxProcessor
from deltaforge_dagster.config.templates import Template, compile_template
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.processors.base import replaced
from deltaforge_dagster.processors.exact_json import Json, Number, dumps, loads
from deltaforge_dagster.sources.outbox import SCHEMA

_log = logging.getLogger(__name__)


class Outbox:
    """One `outbox` processor.

    Attributes:
        counts: `outbox_transformed`, and `outbox_dropped:<reason>` for each reason.
    """

    def __init__(self, config: OutboxProcessor) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._tables = Globs(config.tables)
        self._topic = None if config.topic is None else compile_template(config.topic)
        self._key = None if config.key is None else compile_template(config.key)

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of the change frame with outbox rows converted to their events.

        Raises:
            ProcessorFailed: A row is nested too deeply; with `strict`, a row lacks one of the
                fields.
        """
        rows = self._outbox_rows(frame)
        if not len(rows):
            return frame
        taken = frame.take(pa.array(rows, pa.int64()))
        changes: dict[str, dict[int, Any]] = {}
        keep = np.ones(frame.num_rows, np.bool_)
        dropped: Counter[tuple[str, str]] = Counter()
        names = ("op", "table", "after", "headers")
        columns = (cast("list[str | None]", taken.column(field).to_pylist()) for field in names)
        for row, op, table, after, headers in zip(rows.tolist(), *columns, strict=True):
            image = self._image(after, str(table))
            reason = _refused(op, image)
            if reason is None:
                assert isinstance(image, dict)
                event = self._event(image, str(table), headers)
                for name, value in event.items():
                    changes.setdefault(name, {})[row] = value
                self.counts["outbox_transformed"] += 1
            else:
                dropped[str(table), reason] += 1
                keep[row] = False
        for (table, reason), count in dropped.items():
            _log.warning("%s: %d events of %s dropped: %s", self._config.id, count, table, reason)
            self.counts[f"outbox_dropped:{reason}"] += count
        converted = replaced(frame, changes)
        return converted if keep.all() else converted.filter(pa.array(keep))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _outbox_rows(self, frame: pa.RecordBatch) -> Longs:
        """Return the numbers of the outbox rows whose `table` or `db.table` matches a pattern."""
        schema = frame.column("schema")
        assert isinstance(schema, pa.DictionaryArray)
        wanted = [n for n, name in enumerate(schema.dictionary.to_pylist()) if name == SCHEMA]
        if not wanted:
            return np.zeros(0, np.int64)
        rows = np.flatnonzero(
            np.isin(schema.indices.fill_null(-1).to_numpy(zero_copy_only=False), wanted)
        )
        if not self._tables:
            return rows
        taken = frame.select(["db", "table"]).take(pa.array(rows, pa.int64())).to_pylist()
        names = ((str(row["table"]), f"{row['db']}.{row['table']}") for row in taken)
        return rows[np.array([self._tables.match(aliases) for aliases in names], np.bool_)]

    def _image(self, after: str | None, table: str) -> Json:
        try:
            return None if after is None else loads(after)
        except RecursionError:
            raise ProcessorFailed(
                f"processor {self._config.id}: an event of {table} is nested too deeply"
            ) from None

    def _event(self, image: Mapping[str, Json], table: str, headers: str | None) -> dict[str, Any]:
        """Return the columns in which the event differs from its outbox row."""
        config, columns = self._config, self._config.columns
        topic = (
            _filled(self._topic, image)
            or _text(image.get(columns.topic))
            or config.default_topic
            or None
        )
        if config.strict:
            self._check(image, table, topic)
        key = _filled(self._key, image) or _text(image.get(columns.aggregate_id))
        named = {
            "df-event-id": columns.event_id,
            "df-aggregate-type": columns.aggregate_type,
            "df-aggregate-id": columns.aggregate_id,
            "df-event-type": columns.event_type,
            **config.additional_headers,
        }
        fields = {header: _text(image.get(column)) for header, column in named.items()}
        texts: dict[str, Any] = {} if headers is None else json.loads(headers)
        texts |= {header: text for header, text in fields.items() if text is not None}
        texts["df-source-kind"] = "outbox"
        event: dict[str, Any] = {
            "before": None,
            "after": _payload(image, columns.payload, raw=config.raw_payload),
            "schema": None,
            "headers": json.dumps(texts, ensure_ascii=False, separators=(",", ":")),
            "raw_payload": config.raw_payload,
        }
        return event | {name: text for name, text in (("topic", topic), ("route_key", key)) if text}

    def _check(self, image: Mapping[str, Json], table: str, topic: str | None) -> None:
        columns = self._config.columns
        missing = [] if topic else ["topic"]
        missing += [] if columns.payload in image else ["payload"]  # null is a payload, too
        fields = ("aggregate_type", "aggregate_id", "event_type")
        missing += [field for field in fields if _text(image.get(getattr(columns, field))) is None]
        if missing:
            raise ProcessorFailed(
                f"processor {self._config.id}: outbox strict: event from table '{table}' missing "
                f"required fields: [{', '.join(missing)}]"
            )


def _refused(op: str | None, image: Json) -> str | None:
    """Return the reason why an outbox row is not an event, None if it is one."""
    if op != "c":
        return "non_insert"
    if image is None:
        return "null_payload"
    return None if isinstance(image, dict) else "non_object"


def _payload(image: Mapping[str, Json], column: str, *, raw: bool) -> str:
    """Return the payload as JSON text; text that is JSON is converted to its compact form.

    With `raw`, text keeps every byte: JSON other than a string stays as it is, any other text
    becomes a JSON string.
    """
    value = image[column] if column in image else dict(image)
    if not isinstance(value, str):
        return dumps(value)
    try:
        parsed = loads(value)
    except (ValueError, RecursionError):
        return dumps(value)
    if not raw:
        return dumps(parsed)
    return dumps(value) if isinstance(parsed, str) else value


def _filled(template: Template | None, image: Mapping[str, Json]) -> str:
    """Return a template's text for a row; variables that the row lacks are empty."""
    if template is None:
        return ""
    parts = []
    for part in template.parts:
        if isinstance(part, str):
            parts.append(part)
            continue
        value: Json = dict(image)
        for name in part.path:
            value = value.get(name) if isinstance(value, dict) else None
        parts.append(dumps(value) if isinstance(value, dict | list) else _text(value) or "")
    return "".join(parts)


def _text(value: Json) -> str | None:
    """Return a scalar as text; None for null, objects and lists."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return value.text
    return value if isinstance(value, str) else None
