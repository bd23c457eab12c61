"""A sink whose messages are Avro: registers their schemas, and passes the finished messages on.

Messages are finished only here, because the id of a schema depends on the registry, and its subject
on the destination. So only this sink waits for the registry, and no Spark task needs it. While the
registry is down, messages whose schema ids the sink already knows can still be sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.kernels.avro_bytes import put_schema_ids
from deltaforge_dagster.kernels.message_text import layout
from deltaforge_dagster.sinks.base import (
    AVRO_MESSAGES,
    MessageSchema,
    SendGuard,
    Sink,
    SinkBatch,
    SinkPosition,
    Traffic,
    traffic_of,
)
from deltaforge_dagster.sinks.schema_registry.client import SchemaRegistryClient

_FINISHED = AVRO_MESSAGES.remove(AVRO_MESSAGES.get_field_index("schema"))


class AvroSink:
    """Puts the ids of schemas into the messages of another sink; implements `sinks.base.Sink`.

    Args:
        inner: Sends the messages.
        registry: Registers the schemas.
        encoding: Says under which subjects.
    """

    def __init__(self, inner: Sink, registry: SchemaRegistryClient, encoding: AvroEncoding) -> None:
        self._inner = inner
        self._registry = registry
        self._strategy = encoding.subject_strategy
        self._ids: dict[tuple[str, str], int] = {}

    @property
    def exactly_once(self) -> bool:
        """Whether the other sink stores its own position."""
        return self._inner.exactly_once

    @property
    def takes_parts(self) -> bool:
        """Whether the other sink takes several parts at once."""
        return self._inner.takes_parts

    @property
    def traffic(self) -> Traffic | None:
        """The traffic of the other sink's client library."""
        return traffic_of(self._inner)

    def open(self) -> None:
        """Open the other sink; the registry is asked when a schema is needed."""
        self._inner.open()

    def position(self) -> SinkPosition | None:
        """Return the other sink's position."""
        return self._inner.position()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Register the schemas that are not known yet, and send the batch.

        Raises:
            SinkUnavailable: The registry cannot be reached now, and nothing of the batch was sent.
            SinkRejected: The registry refuses a schema, and nothing of the batch was sent.
            DeltaforgeError: The other sink failed.
        """
        *earlier, messages = (self._finished(part, batch.schemas, guard) for part in batch.parts)
        finished = replace(batch, messages=messages, earlier=tuple(earlier), schemas=())
        return self._inner.send(finished, guard)

    def close(self) -> None:
        """Close the other sink and the connections to the registry."""
        self._registry.close()
        self._inner.close()

    def _finished(
        self, messages: pa.RecordBatch, schemas: tuple[MessageSchema, ...], guard: SendGuard
    ) -> pa.RecordBatch:
        """Return messages with the ids of their schemas."""
        numbers = messages.column("schema").fill_null(-1).to_numpy()
        topics = messages.column("destination").dictionary_encode()
        names = cast("list[str]", topics.dictionary.to_pylist())
        codes = topics.indices.to_numpy().astype(np.int64) * len(schemas) + numbers
        codes[numbers < 0] = -1
        distinct, indices = np.unique(codes, return_inverse=True)
        ids = np.zeros(len(distinct), np.int64)
        for index, code in enumerate(distinct.tolist()):
            if code >= 0:
                topic, number = divmod(code, len(schemas))
                ids[index] = self._id(names[topic], schemas[number], guard)
        indices = np.where(numbers < 0, -1, indices.reshape(-1)).astype(np.int32)
        columns = [
            _with_ids(messages.column("value"), indices, ids)
            if name == "value"
            else messages.column(name)
            for name in _FINISHED.names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=_FINISHED)

    def _id(self, topic: str, schema: MessageSchema, guard: SendGuard) -> int:
        subject = subject_of(self._strategy, topic, schema.record)
        schema_id = self._ids.get((subject, schema.text))
        if schema_id is None:
            guard()
            schema_id = self._ids[subject, schema.text] = self._registry.register(
                subject, schema.text
            )
        return schema_id


def subject_of(strategy: str, topic: str, record: str) -> str:
    """Return the subject of the values in a topic (Confluent's "Subject name strategy")."""
    match strategy:
        case "topic_name":
            return f"{topic}-value"
        case "record_name":
            return record
        case _:
            return f"{topic}-{record}"


def _with_ids(values: pa.Array[Any], indices: Any, ids: Any) -> pa.Array[Any]:
    ends, data = layout(cast("pa.StringArray", values))
    first = int(ends[0])
    out = data[first : int(ends[-1])].copy()
    moved = ends - np.int32(first)
    put_schema_ids(out, moved, indices, ids)
    bitmap = None
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little").data)
    buffers = [bitmap, pa.py_buffer(moved.data), pa.py_buffer(out.data)]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)
