"""Translates Kafka's errors.

An error has a code: one of the brokers' ("Kafka protocol guide", "Error codes") or, with a name
that begins with `_`, one of librdkafka's own (`rdkafka.h`, `rd_kafka_resp_err_t`). The code decides
whether it helps to wait and retry.
"""

from __future__ import annotations

import re
from typing import cast

from confluent_kafka import KafkaError, KafkaException

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    PositionMoved,
    SinkRejected,
    SinkUnavailable,
)

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
