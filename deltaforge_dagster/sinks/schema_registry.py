"""A sink whose messages are Avro: registers their schemas, and passes the finished messages on.

Messages are finished only here, because the id of a schema depends on the registry, and its subject
on the destination. So only this sink waits for the registry, and no Spark task needs it. While the
registry is down, messages whose schema ids the sink already knows can still be sent.

Schemas are registered with `POST /subjects/<subject>/versions` (Confluent Platform, "Schema
Registry API Reference"), which returns the id of a schema that the subject already has, and so may
be repeated. An id belongs to the schema and not to the subject, and never changes.

`findings` checks a registry before a run, and registers nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    SinkRejected,
)
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
from deltaforge_dagster.sinks.registry_connection import (
    RegistryConnection,
    message_of,
    temporary_or_forbidden,
)
from deltaforge_dagster.sources.findings import Finding

_MOST_ID = (1 << 31) - 1  # ids are signed integers of 4 bytes in a message's header
_INCOMPATIBLE, _INVALID = 409, 422  # the registry's use of these HTTP statuses

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


class SchemaRegistryClient:
    """One registry, as one sink uses it.

    Args:
        sink_id: Name of the sink in errors.
        encoding: The registry, and how to log in.
    """

    def __init__(self, sink_id: str, encoding: AvroEncoding) -> None:
        url = encoding.schema_registry_url.rstrip("/")
        self._where = f"sink {sink_id}: the schema registry at {url}"
        self._connection = RegistryConnection(self._where, url, encoding)
        self._login = (
            "encoding.username, encoding.password"
            if encoding.oauth_token_url is None
            else "encoding.oauth_scope, encoding.oauth_client_id"
        )

    def register(self, subject: str, schema: str) -> int:
        """Register a schema under a subject, unless it is already, and return its id.

        Raises:
            SinkUnavailable: The registry cannot be reached, or cannot answer now.
            SinkRejected: The subject has an incompatible schema, or this is no registry.
            AuthFailed: It rejects the credentials.
            PermissionMissing: The user may not register the schema.
        """
        content = json.dumps({"schema": schema, "schemaType": "AVRO"}).encode()
        answer = self._connection.request(
            "POST", f"/subjects/{quote(subject, safe='')}/versions", content
        )
        if answer.status_code == _INCOMPATIBLE:
            said = message_of(answer)
            raise SinkRejected(
                f"{self._where} refuses the new schema of subject {subject!r}, because it is not "
                f"compatible with an earlier one{said}; set another compatibility for "
                f"the subject (PUT /config/{subject}), or send to another topic; "
                "nothing is sent until then"
            )
        self._check(answer, f"register a schema under subject {subject!r}")
        reply = self._content(answer)
        number = reply.get("id") if isinstance(reply, dict) else None
        if type(number) is not int or not 0 <= number <= _MOST_ID:
            raise self._no_registry("its answer has no id of a schema")
        return number

    def subjects(self) -> list[str]:
        """Return the names of all subjects that the user may see; raises what `register` raises."""
        answer = self._connection.request("GET", "/subjects")
        self._check(answer, "list subjects")
        reply = self._content(answer)
        if not isinstance(reply, list):
            raise self._no_registry("its answer is no list of subjects")
        return [str(subject) for subject in reply]

    def compatibility(self, subject: str | None) -> str | None:
        """Return the compatibility of a subject, or with None the registry's own.

        Return None if the registry does not tell this user.
        """
        path = (
            "/config"
            if subject is None
            else f"/config/{quote(subject, safe='')}?defaultToGlobal=true"
        )
        answer = self._connection.request("GET", path)
        if answer.status_code != httpx.codes.OK:
            return None
        reply = self._content(answer)
        level = reply.get("compatibilityLevel") if isinstance(reply, dict) else None
        return level if isinstance(level, str) else None

    def close(self) -> None:
        """Close the connections, which ends a request that another thread has made.

        The next request opens them again.
        """
        self._connection.close()

    def _check(self, answer: httpx.Response, what: str) -> None:
        status = answer.status_code
        if status == httpx.codes.OK:
            return
        refusal = f"HTTP {status}{message_of(answer)}"
        text = f"{self._where} does not {what}: {refusal}"
        if status == httpx.codes.UNAUTHORIZED:
            raise AuthFailed(f"{text} ({self._login})")
        if status == _INVALID:
            raise SinkRejected(text)
        raise temporary_or_forbidden(answer, text) or self._no_registry(refusal)

    def _content(self, answer: httpx.Response) -> Any:
        try:
            return json.loads(answer.content)
        except ValueError:
            raise self._no_registry("its answer is not JSON") from None

    def _no_registry(self, why: str) -> DeltaforgeError:
        return SinkRejected(
            f"{self._where} does not answer as a schema registry does: {why}; "
            "check encoding.schema_registry_url"
        )


def findings(sink_id: str, encoding: AvroEncoding, names: Sequence[str]) -> list[Finding]:
    """Return whether a registry answers and accepts the login, and which compatibility it demands.

    Args:
        sink_id: The sink.
        encoding: Its registry.
        names: Its destinations; those that depend on changes are templates.
    """
    about = f"sink {sink_id}"
    with contextlib.closing(SchemaRegistryClient(sink_id, encoding)) as registry:
        try:
            existing = set(registry.subjects())
            by_topic = encoding.subject_strategy == "topic_name"
            topics = [name for name in names if by_topic and not compile_template(name).variables]
            subjects: list[str | None] = [
                subject_of(encoding.subject_strategy, topic, "") for topic in topics
            ]
            levels = {subject: registry.compatibility(subject) for subject in subjects or [None]}
        except DeltaforgeError as error:
            return [Finding(about, "error", str(error).removeprefix(f"{about}: "))]
    where = f"the schema registry at {encoding.schema_registry_url}"
    report = [Finding(about, "ok", f"{where} answers")]
    for subject, level in levels.items():
        label = "its subjects" if subject is None else f"subject {subject!r}"
        if subject is not None and subject not in existing:
            label += ", which it does not have yet,"
        if level is None:
            text = f"which compatibility {where} demands for {label} it does not tell this user"
            report.append(Finding(about, "note", text))
        else:
            report.append(Finding(about, "ok", f"the compatibility of {label} is {level}"))
    return report


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
