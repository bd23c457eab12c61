"""A producer of librdkafka that takes messages as Arrow columns.

In other respects it is like `confluent_kafka.Producer`, whose errors it raises and reports. The
library works in threads of its own and calls nothing here: what it has to say are events, which
`poll` and `flush` take from its queue.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from deltaforge_dagster.sinks.kafka.librdkafka import (
    ANY_PARTITION,
    ARGUMENT,
    ARGUMENT_FLAGS,
    ARGUMENT_HEADERS,
    ARGUMENT_KEY,
    ARGUMENT_PRIVATE,
    ARGUMENT_TOPIC,
    ARGUMENT_VALUE,
    COPY,
    DELIVERY,
    ERROR,
    LIBRARY,
    LOG,
    LOGGER,
    MESSAGE,
    PRODUCER,
    PURGE_AT_ONCE,
    PURGE_IN_FLIGHT,
    PURGE_QUEUE,
    STATISTICS,
    TOKEN,
    MetadataStruct,
)

_TEXT_BYTES = 512
"""Size of the buffer for the text of an error."""

_OVERHEAD = 1024
"""More bytes than a message has in addition to its key and value (`rd_kafka_msg_max_wire_size`)."""

_REFUSAL_SECONDS = 0.02
"""How late `flush` may see that a message was refused."""

_ABORT_MILLISECONDS = 100
"""How long one call to abort a transaction may take; the next one continues it."""

_EVENTS = DELIVERY | LOG | ERROR | STATISTICS

_UNSIGNED = b"tokens without a signature (enable.sasl.oauthbearer.unsecure.jwt) are not supported"

_BLOCK_ROWS = 2_000
"""How many messages with headers are prepared at a time."""

_EMPTY = ctypes.create_string_buffer(1)
"""What an empty text points to: the address 0 would make it null."""

_DEBUG = 7
"""Syslog's level of the library's lines for debugging."""


class Producer:
    """A Kafka producer.

    Used by one thread, except for `purge` and `len`, which any thread may call.

    Args:
        properties: librdkafka's properties.
        on_refusal: Called for each message that does not arrive, with the error and the message's
            row (`produce`).
        on_error: Called for errors that concern no message. One that is fatal ends the producer.
        on_statistics: Called with a JSON object every `statistics.interval.ms`.

    Raises:
        KafkaException: A property is unknown or has an invalid value, or they contradict each
            other.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        *,
        on_refusal: Callable[[KafkaError, int], None],
        on_error: Callable[[KafkaError], None],
        on_statistics: Callable[[str], None],
    ) -> None:
        self._handle: int | None = None
        self._topics: dict[str, int] = {}
        self._on_refusal = on_refusal
        self._on_error = on_error
        self._on_statistics = on_statistics
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        conf = LIBRARY.rd_kafka_conf_new()
        fixed = {
            "delivery.report.only.error": "true",
            "enabled_events": str(_EVENTS),
            "log.queue": "true",
        }
        for name, value in {**properties, **fixed}.items():
            if LIBRARY.rd_kafka_conf_set(conf, name.encode(), value.encode(), text, _TEXT_BYTES):
                LIBRARY.rd_kafka_conf_destroy(conf)
                raise _exception(KafkaError._INVALID_ARG, text.value)  # noqa: SLF001
        size = ctypes.c_size_t(_TEXT_BYTES)
        LIBRARY.rd_kafka_conf_get(conf, b"message.max.bytes", text, ctypes.byref(size))
        self._largest = int(text.value)
        self._handle = LIBRARY.rd_kafka_new(PRODUCER, conf, text, _TEXT_BYTES)
        if self._handle is None:
            code = LIBRARY.rd_kafka_last_error()
            LIBRARY.rd_kafka_conf_destroy(conf)
            raise _exception(code, text.value)
        LIBRARY.rd_kafka_set_log_queue(self._handle, None)
        self._queue = LIBRARY.rd_kafka_queue_get_main(self._handle)

    def __del__(self) -> None:
        """End the library's threads; messages in the queue are lost."""
        if self._handle is not None and not sys.is_finalizing():
            for topic in self._topics.values():
                LIBRARY.rd_kafka_topic_destroy(topic)
            LIBRARY.rd_kafka_queue_destroy(self._queue)
            LIBRARY.rd_kafka_destroy(self._handle)

    def __len__(self) -> int:
        """Return the number of messages with unknown outcome and of reports waiting for `poll`."""
        return int(LIBRARY.rd_kafka_outq_len(self._handle))

    def produce(self, rows: pa.RecordBatch, replay: str | None, *, first_row: int = 0) -> None:
        """Put messages (columns of `sinks.base.MESSAGES`) into the queue.

        Messages of one topic stay in order. If the library itself refuses one, it is reported as if
        a broker had, and none of the messages of its topic behind it are in the queue.

        Args:
            rows: The messages.
            replay: Value of the header `df-replay`, if they are to have one.
            first_row: Row number of the first message in reports; the others are counted from it.
        """
        topics = rows.column("destination").dictionary_encode()
        names = cast("list[str]", topics.dictionary.to_pylist())
        handles = np.array([self._topic(name) for name in names], np.uint64)
        places = topics.indices.to_numpy()
        messages = _messages(rows, first_row)
        headers = rows.column("headers")
        if replay is not None or headers.null_count < len(headers):
            messages["rkt"] = handles[places]
            self._produce_with_headers(messages, headers, replay)
        elif len(names) == 1:
            self._produce_to(int(handles[0]), messages)
        else:
            order = np.argsort(places, kind="stable")
            ends = np.searchsorted(places[order], np.arange(1, len(names)))
            for handle, rows_of_topic in zip(handles.tolist(), np.split(order, ends), strict=True):
                if not self._produce_to(handle, messages[rows_of_topic]):
                    break

    def _produce_to(self, topic: int, messages: npt.NDArray[Any]) -> bool:
        """Put messages of one topic into the queue; return False if one was refused."""
        # The library continues after a message that is too large. So one that could be is passed by
        # itself.
        sizes = messages["len"] + messages["key_len"]
        large = np.flatnonzero(sizes + _OVERHEAD > self._largest)
        ends = np.unique(np.concatenate([large, large + 1, [len(messages)]]))
        start = 0
        for end in ends[ends > 0].tolist():
            part = messages[start:end]
            accepted = LIBRARY.rd_kafka_produce_batch(
                topic, ANY_PARTITION, COPY, part.ctypes.data, len(part)
            )
            if accepted != len(part):
                refused = int(np.flatnonzero(part["err"])[0])
                self._on_refusal(
                    KafkaError(int(part["err"][refused])), int(part["_private"][refused])
                )
                return False
            start = end
        return True

    def _produce_with_headers(
        self, messages: npt.NDArray[Any], headers: pa.Array[Any], replay: str | None
    ) -> None:
        """Put messages into the queue, with a call for each; stop at one that is refused."""
        marks = [] if replay is None else [(b"df-replay", replay.encode())]
        for start in range(0, len(messages), _BLOCK_ROWS):
            block = messages[start : start + _BLOCK_ROWS]
            arguments = _arguments(block)
            texts = cast("list[str | None]", headers.slice(start, _BLOCK_ROWS).to_pylist())
            for row, text in enumerate(texts):
                event_headers = {} if text is None else cast("dict[str, str]", orjson.loads(text))
                pairs = [
                    *((name.encode(), value.encode()) for name, value in event_headers.items()),
                    *marks,
                ]
                added = _headers(pairs)
                arguments["first"][row, -1] = added
                failure = LIBRARY.rd_kafka_produceva(
                    self._handle, arguments[row].ctypes.data, arguments.shape[1]
                )
                if failure:
                    LIBRARY.rd_kafka_headers_destroy(added)
                    self._on_refusal(_error(failure), int(block["_private"][row]))
                    return

    def poll(self, seconds: float) -> None:
        """Report all events; if there is none, wait for one, but no longer than `seconds`."""
        wait = _milliseconds(seconds)
        while event := LIBRARY.rd_kafka_queue_poll(self._queue, wait):
            try:
                self._report(event)
            finally:
                LIBRARY.rd_kafka_event_destroy(event)
            wait = 0

    def flush(self, seconds: float) -> int:
        """Wait up to `seconds` until all messages are acknowledged or refused; return `len`."""
        # `rd_kafka_flush` returns as soon as the last message is acknowledged. A message that was
        # refused counts until its report is taken from the queue. (With callbacks for reports, the
        # library would look for both only every 10 ms, as long as a client chunk takes.)
        end = time.monotonic() + seconds
        while True:
            self.poll(0)
            left = end - time.monotonic()
            if not (waiting := len(self)) or left <= 0:
                return waiting
            LIBRARY.rd_kafka_flush(self._handle, _milliseconds(min(left, _REFUSAL_SECONDS)) or 1)

    def purge(self, *, in_flight: bool = True, blocking: bool = True) -> None:
        """Refuse all messages in the queue.

        With `in_flight`, refuse also those on their way; their outcome then stays unknown.
        """
        flags = PURGE_QUEUE | in_flight * PURGE_IN_FLIGHT | (not blocking) * PURGE_AT_ONCE
        LIBRARY.rd_kafka_purge(self._handle, flags)

    def cluster_id(self, seconds: float) -> str | None:
        """Return the cluster's id, or None if no broker has answered in time."""
        address = LIBRARY.rd_kafka_clusterid(self._handle, _milliseconds(seconds))
        if address is None:
            return None
        text = ctypes.string_at(address).decode()
        LIBRARY.rd_kafka_mem_free(self._handle, address)
        return text

    def ask(self, topic: str | None, seconds: float) -> tuple[KafkaError | None, int]:
        """Ask a broker for metadata, which makes the library connect to one.

        Args:
            topic: The topic to ask about; None for those that are already known.
            seconds: How long to wait for the answer.

        Returns:
            The error of the topic, if any, and the number of its partitions.

        Raises:
            KafkaException: There was no answer.
        """
        handle = None if topic is None else self._topic(topic)
        answer = ctypes.POINTER(MetadataStruct)()
        code = LIBRARY.rd_kafka_metadata(
            self._handle, 0, handle, ctypes.byref(answer), _milliseconds(seconds)
        )
        if code:
            raise _exception(code)
        try:
            metadata = answer.contents
            topics = [metadata.topics[number] for number in range(metadata.topic_cnt)]
            codes = [described.err for described in topics]
            partitions = sum(described.partition_cnt for described in topics)
        finally:
            LIBRARY.rd_kafka_metadata_destroy(answer)
        return next((KafkaError(code) for code in codes if code), None), partitions

    def init_transactions(self, seconds: float) -> None:
        """Take over the transactional id.

        Raises:
            KafkaException: It failed, or did not succeed in time.
        """
        _check(LIBRARY.rd_kafka_init_transactions(self._handle, _milliseconds(seconds)))

    def begin_transaction(self) -> None:
        """Begin a transaction.

        Raises:
            KafkaException: There is one already, or the producer has failed.
        """
        _check(LIBRARY.rd_kafka_begin_transaction(self._handle))

    def send_offset_to_transaction(
        self, topic: str, offset: int, metadata: str, group: str, seconds: float
    ) -> None:
        """Make the commit of an offset part of the transaction.

        Args:
            topic: The topic; the offset belongs to its partition 0.
            offset: The offset.
            metadata: The text stored with it.
            group: The consumer group, of which no member needs to exist.
            seconds: How long to wait.

        Raises:
            KafkaException: It failed, or did not succeed in time.
        """
        # Stored with a 0 at its end: confluent_kafka writes it, too, and its consumer reads up to
        # it.
        text = metadata.encode() + b"\0"
        offsets = LIBRARY.rd_kafka_topic_partition_list_new(1)
        member = LIBRARY.rd_kafka_consumer_group_metadata_new(group.encode())
        try:
            stored = LIBRARY.rd_kafka_topic_partition_list_add(offsets, topic.encode(), 0).contents
            stored.offset = offset
            # The list frees it, so it must be the library's memory.
            stored.metadata = LIBRARY.rd_kafka_mem_malloc(self._handle, len(text))
            stored.metadata_size = len(text)
            ctypes.memmove(stored.metadata, text, len(text))
            _check(
                LIBRARY.rd_kafka_send_offsets_to_transaction(
                    self._handle, offsets, member, _milliseconds(seconds)
                )
            )
        finally:
            LIBRARY.rd_kafka_consumer_group_metadata_destroy(member)
            LIBRARY.rd_kafka_topic_partition_list_destroy(offsets)

    def commit_transaction(self, seconds: float) -> None:
        """Commit the transaction.

        Raises:
            KafkaException: It failed, or did not succeed in time.
        """
        _check(LIBRARY.rd_kafka_commit_transaction(self._handle, _milliseconds(seconds)))

    def abort_transaction(self, seconds: float) -> None:
        """Abort the transaction.

        Raises:
            KafkaException: It failed, or did not succeed in time.
        """
        end = time.monotonic() + seconds
        while True:
            self.poll(0)  # the library waits until messages that it gives up have been reported
            left = end - time.monotonic()
            try:
                _check(LIBRARY.rd_kafka_abort_transaction(self._handle, _ABORT_MILLISECONDS))
            except KafkaException as exception:
                if left <= 0 or not exception.args[0].retriable():
                    raise
            else:
                return

    def _topic(self, name: str) -> int:
        """Return the handle of a topic (`rd_kafka_topic_t`), which is made at its first use."""
        handle = self._topics.get(name)
        if handle is None:
            handle = LIBRARY.rd_kafka_topic_new(self._handle, name.encode(), None)
            if handle is None:
                raise _exception(LIBRARY.rd_kafka_last_error())
            self._topics[name] = handle
        return handle

    def _report(self, event: int) -> None:
        kind = LIBRARY.rd_kafka_event_type(event)
        if kind == DELIVERY:
            while message := LIBRARY.rd_kafka_event_message_next(event):
                refused = message.contents
                self._on_refusal(KafkaError(refused.err), refused.private or 0)
        elif kind == ERROR:
            text = LIBRARY.rd_kafka_event_error_string(event).decode(errors="replace")
            fatal = bool(LIBRARY.rd_kafka_event_error_is_fatal(event))
            self._on_error(KafkaError(LIBRARY.rd_kafka_event_error(event), text, fatal=fatal))
        elif kind == STATISTICS:
            self._on_statistics(LIBRARY.rd_kafka_event_stats(event).decode())
        elif kind == LOG:
            _log(event)
        elif kind == TOKEN:
            LIBRARY.rd_kafka_oauthbearer_set_token_failure(self._handle, _UNSIGNED)


def _log(event: int) -> None:
    facility, text, level = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_int()
    LIBRARY.rd_kafka_event_log(event, facility, text, level)
    parts = [(pointer.value or b"").decode(errors="replace") for pointer in (facility, text)]
    LOGGER.log(logging.DEBUG if level.value >= _DEBUG else logging.INFO, "%s: %s", *parts)


def _messages(rows: pa.RecordBatch, first_row: int) -> npt.NDArray[Any]:
    """Return messages that point into the memory of the columns, without their topics."""
    messages = np.zeros(len(rows), MESSAGE)
    messages["_private"] = np.arange(first_row, first_row + len(rows))
    for name, address, length in (("value", "payload", "len"), ("key", "key", "key_len")):
        column = rows.column(name)
        ends = text_ends(column).astype(np.uint64)
        data = column.buffers()[2]
        start = data.address if data is not None and data.size else ctypes.addressof(_EMPTY)
        messages[address] = ends[:-1] + np.uint64(start)
        messages[length] = np.diff(ends)
        if column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            messages[address][nulls] = messages[length][nulls] = 0
    return messages


def _arguments(messages: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return arguments for `rd_kafka_produceva`, a row per message; the last one is for headers."""
    columns: tuple[tuple[int, Any, Any], ...] = (
        (ARGUMENT_TOPIC, messages["rkt"], 0),
        (ARGUMENT_VALUE, messages["payload"], messages["len"]),
        (ARGUMENT_KEY, messages["key"], messages["key_len"]),
        (ARGUMENT_PRIVATE, messages["_private"], 0),
        (ARGUMENT_FLAGS, COPY, 0),
        (ARGUMENT_HEADERS, 0, 0),
    )
    arguments = np.zeros((len(messages), len(columns)), ARGUMENT)
    for number, (kind, first, second) in enumerate(columns):
        arguments["vtype"][:, number] = kind
        arguments["first"][:, number] = first
        arguments["second"][:, number] = second
    return arguments


def _headers(pairs: list[tuple[bytes, bytes]]) -> int:
    """Return headers in the library's memory; the function that takes them over frees them."""
    headers = cast("int", LIBRARY.rd_kafka_headers_new(len(pairs)))
    for name, value in pairs:
        LIBRARY.rd_kafka_header_add(headers, name, len(name), value, len(value))
    return headers


def text_ends(column: pa.Array[Any]) -> npt.NDArray[np.int32]:
    """Return the Arrow offsets of a text column: row n is between offsets n and n + 1."""
    ends = column.buffers()[1]
    if ends is None:
        return np.zeros(len(column) + 1, np.int32)
    return np.frombuffer(memoryview(ends), np.int32)[column.offset :][: len(column) + 1]


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _exception(code: int, text: bytes = b"") -> KafkaException:
    return KafkaException(KafkaError(code, text.decode(errors="replace") or None))


def _check(failure: int | None) -> None:
    if failure:
        raise KafkaException(_error(failure))


def _error(failure: int) -> KafkaError:
    """Return an error of the library's type, which is freed."""
    try:
        return KafkaError(
            LIBRARY.rd_kafka_error_code(failure),
            LIBRARY.rd_kafka_error_string(failure).decode(errors="replace"),
            fatal=bool(LIBRARY.rd_kafka_error_is_fatal(failure)),
            retriable=bool(LIBRARY.rd_kafka_error_is_retriable(failure)),
            txn_requires_abort=bool(LIBRARY.rd_kafka_error_txn_requires_abort(failure)),
        )
    finally:
        LIBRARY.rd_kafka_error_destroy(failure)
