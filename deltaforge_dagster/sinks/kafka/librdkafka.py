"""librdkafka as the sink uses it: functions that `producer` calls, its log, and its errors.

`confluent_kafka` brings the library (`rdkafka.h`). Its own producer needs a call and several Python
objects for each message; `rd_kafka_produce_batch` takes an array of messages that points into
Arrow's memory, without the interpreter lock.

`LOGGER` receives the library's own log, for debugging: the errors in it are raised elsewhere
anyway.

An error has a code: one of the brokers' ("Kafka protocol guide", "Error codes") or, with a name
that begins with `_`, one of librdkafka's own (`rd_kafka_resp_err_t`). The code decides whether it
helps to wait and retry.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, cast

import numpy as np
from confluent_kafka import KafkaError, KafkaException, cimpl

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
)

PRODUCER = 0
"""`rd_kafka_type_t`."""

COPY = 0x2
"""Flag of a message: the library copies it (`RD_KAFKA_MSG_F_COPY`)."""

ANY_PARTITION = -1
"""The partition is computed from the key (`RD_KAFKA_PARTITION_UA`)."""

PURGE_QUEUE, PURGE_IN_FLIGHT, PURGE_AT_ONCE = 0x1, 0x2, 0x4

DELIVERY, LOG, ERROR, STATISTICS, TOKEN = 0x1, 0x4, 0x8, 0x40, 0x100
"""`rd_kafka_event_type_t`."""

MESSAGE = np.dtype(
    {
        "names": [
            "err", "rkt", "partition", "payload", "len", "key", "key_len", "offset", "_private",
        ],
        "formats": ["i4", "u8", "i4", "u8", "u8", "u8", "u8", "i8", "u8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)  # fmt: skip
"""`rd_kafka_message_t`.

`payload` and `key` are addresses, 0 for null; `_private` is for the caller's own use.

     0      4      8      16        20    24        32     40     48        56       64         72
     | err  |      | rkt  | partition |   | payload | len  | key  | key_len | offset | _private |
"""

ARGUMENT = np.dtype(
    {
        "names": ["vtype", "first", "second"],
        "formats": ["i4", "u8", "u8"],
        "offsets": [0, 8, 16],
        "itemsize": 72,
    }
)
"""`rd_kafka_vu_t`, an argument of `rd_kafka_produceva`.

It has a type, and a number, an address, or address and length.

     0       4      8        16        24        72
     | vtype |      | first  | second  | padding |
"""

ARGUMENT_TOPIC, ARGUMENT_VALUE, ARGUMENT_KEY = 2, 4, 5
ARGUMENT_PRIVATE, ARGUMENT_FLAGS, ARGUMENT_HEADERS = 6, 7, 10
"""`rd_kafka_vtype_t`."""
_TEXT = ctypes.POINTER(c_char_p)

_logger = logging.getLogger(__name__)


class MessageStruct(ctypes.Structure):
    """The same as `MESSAGE`, for a single message of an event."""

    _fields_ = (
        ("err", c_int),
        ("rkt", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("len", c_size_t),
        ("key", c_void_p),
        ("key_len", c_size_t),
        ("offset", c_int64),
        ("private", c_void_p),
    )


class TopicPartitionStruct(ctypes.Structure):
    """`rd_kafka_topic_partition_t`."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", c_size_t),
        ("opaque", c_void_p),
        ("err", c_int),
        ("private", c_void_p),
    )


class MetadataTopicStruct(ctypes.Structure):
    """`rd_kafka_metadata_topic_t`."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition_cnt", c_int),
        ("partitions", c_void_p),
        ("err", c_int),
    )


class MetadataStruct(ctypes.Structure):
    """`rd_kafka_metadata_t`."""

    _fields_ = (
        ("broker_cnt", c_int),
        ("brokers", c_void_p),
        ("topic_cnt", c_int),
        ("topics", ctypes.POINTER(MetadataTopicStruct)),
        ("orig_broker_id", c_int32),
        ("orig_broker_name", c_char_p),
    )


_METADATA = ctypes.POINTER(MetadataStruct)


_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {  # type of the result, types of the arguments
    "begin_transaction": (c_void_p, c_void_p),
    "abort_transaction": (c_void_p, c_void_p, c_int),
    "clusterid": (c_void_p, c_void_p, c_int),
    "commit_transaction": (c_void_p, c_void_p, c_int),
    "conf_destroy": (None, c_void_p),
    "conf_get": (c_int, c_void_p, c_char_p, c_char_p, ctypes.POINTER(c_size_t)),
    "conf_new": (c_void_p,),
    "conf_set": (c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t),
    "consumer_group_metadata_destroy": (None, c_void_p),
    "consumer_group_metadata_new": (c_void_p, c_char_p),
    "destroy": (None, c_void_p),
    "error_code": (c_int, c_void_p),
    "error_destroy": (None, c_void_p),
    "error_is_fatal": (c_int, c_void_p),
    "error_is_retriable": (c_int, c_void_p),
    "error_string": (c_char_p, c_void_p),
    "error_txn_requires_abort": (c_int, c_void_p),
    "event_destroy": (None, c_void_p),
    "event_error": (c_int, c_void_p),
    "event_error_is_fatal": (c_int, c_void_p),
    "event_error_string": (c_char_p, c_void_p),
    "event_log": (c_int, c_void_p, _TEXT, _TEXT, ctypes.POINTER(c_int)),
    "event_message_next": (ctypes.POINTER(MessageStruct), c_void_p),
    "event_stats": (c_char_p, c_void_p),
    "event_type": (c_int, c_void_p),
    "flush": (c_int, c_void_p, c_int),
    "header_add": (c_int, c_void_p, c_char_p, c_size_t, c_char_p, c_size_t),
    "headers_destroy": (None, c_void_p),
    "headers_new": (c_void_p, c_size_t),
    "init_transactions": (c_void_p, c_void_p, c_int),
    "last_error": (c_int,),
    "mem_free": (None, c_void_p, c_void_p),
    "mem_malloc": (c_void_p, c_void_p, c_size_t),
    "metadata": (c_int, c_void_p, c_int, c_void_p, ctypes.POINTER(_METADATA), c_int),
    "metadata_destroy": (None, _METADATA),
    "new": (c_void_p, c_int, c_void_p, c_char_p, c_size_t),
    "oauthbearer_set_token_failure": (c_int, c_void_p, c_char_p),
    "outq_len": (c_int, c_void_p),
    "produce_batch": (c_int, c_void_p, c_int32, c_int, c_void_p, c_int),
    "produceva": (c_void_p, c_void_p, c_void_p, c_size_t),
    "purge": (c_int, c_void_p, c_int),
    "queue_destroy": (None, c_void_p),
    "queue_get_main": (c_void_p, c_void_p),
    "queue_poll": (c_void_p, c_void_p, c_int),
    "send_offsets_to_transaction": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "set_log_queue": (c_int, c_void_p, c_void_p),
    "topic_destroy": (None, c_void_p),
    "topic_new": (c_void_p, c_void_p, c_char_p, c_void_p),
    "topic_partition_list_add": (
        ctypes.POINTER(TopicPartitionStruct), c_void_p, c_char_p, c_int32,
    ),
    "topic_partition_list_destroy": (None, c_void_p),
    "topic_partition_list_new": (c_void_p, c_int),
}  # fmt: skip


def _library() -> ctypes.CDLL:
    # The module of confluent_kafka is linked with the library, so its handle finds the library's
    # functions, too.
    library = ctypes.CDLL(cimpl.__file__)
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = library[f"rd_kafka_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(library, f"rd_kafka_{name}", function)
    return library


LIBRARY: Any = _library()
"""Has the functions listed above as attributes, with their full names."""


class _Log:
    def log(self, level: int, text: str, *args: object) -> None:
        """Log a line at INFO or below, so that it does not appear on a terminal by default."""
        _logger.log(min(level, logging.INFO), text, *args)


LOGGER = cast("logging.Logger", _Log())
"""The logger for clients of `confluent_kafka`."""

_AUTH = frozenset(
    [
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka's own codes are named like this
        KafkaError._SSL,  # noqa: SLF001
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
    ]
)

_CERTIFICATE_ALERT = re.compile(r"SSL alert number (?:4[0-9]|116)\b")
"""TLS alerts of a broker that does not accept the client's certificate or requires one (RFC 8446,
section 6.2). In TLS 1.3 they arrive only after the handshake, so librdkafka reports a broken
connection."""

_FIRST_WORDS = re.compile(r"in state (?:SSL_HANDSHAKE|APIVERSION_QUERY)\b")
"""librdkafka's names of the connection states before any protocol has been agreed on."""

_GRANTS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Write and Describe on the topic (Create, too, if it "
    "is not there yet)",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read and Describe on the consumer group that is named "
    "like the transactional id",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write and Describe on the transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IdempotentWrite on the cluster",
}
"""Permissions that `kafka-acls --add --allow-principal ... --operation ...` must grant."""

_LASTING = frozenset(
    [
        KafkaError._INVALID_ARG,  # noqa: SLF001
        KafkaError._UNSUPPORTED_FEATURE,  # noqa: SLF001
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.UNSUPPORTED_VERSION,
    ]
)
"""Codes of permanent errors: the same request is refused again until something is changed."""

UNDELIVERABLE = {
    KafkaError.INVALID_RECORD: "serialization",
    KafkaError.MSG_SIZE_TOO_LARGE: "too_large",
    KafkaError.RECORD_LIST_TOO_LARGE: "too_large",
}
"""Codes that concern a message, or the record batch that contains it, and the cause that
`errors.Undeliverable` names. A record without a key is invalid if the topic is compacted."""

_FENCED = frozenset(
    [
        KafkaError._FENCED,  # noqa: SLF001
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
    ]
)


def error_of(exception: KafkaException) -> KafkaError:
    """Return the error, with its code, that an exception of the library carries."""
    return cast("KafkaError", exception.args[0])


def is_auth(error: KafkaError) -> bool:
    """Return whether authentication failed, because broker or client refused the other."""
    refused = (
        error.code() == KafkaError._TRANSPORT  # noqa: SLF001
        and _CERTIFICATE_ALERT.search(error.str())
    )
    return error.code() in _AUTH or bool(refused)


def is_misunderstanding(error: KafkaError) -> bool:
    """Return whether a broker hung up before any protocol was agreed on.

    Possibly only one of the two sides uses TLS. The library's text differs by how far it got
    ("closed by peer", "connecting to a PLAINTEXT broker listener?"), but always names the
    connection's state.
    """
    return (
        error.code() == KafkaError._TRANSPORT  # noqa: SLF001
        and bool(_FIRST_WORDS.search(error.str()))
    )


def translated(where: str, error: KafkaError) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an error of the library.

    Args:
        where: Prefix of the message: the sink, and the topic if it is known.
        error: The library's error; its text names servers and settings, never values of rows.
    """
    text = f"{where}: {error.str()} ({error.name()})"
    code = error.code()
    if is_auth(error):
        return AuthFailed(
            f"{text}; check security.protocol and the sasl.* and ssl.* properties in client_conf"
        )
    if code in _GRANTS:
        return PermissionMissing(f"{text}; the Kafka user needs an ACL that allows {_GRANTS[code]}")
    if code in _FENCED:
        return PositionMoved(
            f"{text}; another sender with the same pipeline and sink name is at work on this "
            "cluster"
        )
    if code in _LASTING:
        return SinkRejected(text)
    return SinkUnavailable(text)
