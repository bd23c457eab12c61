"""The options of an HTTP sink."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from deltaforge_dagster.sinks.http.sink_type import HTTP, HttpSinkConfig
from deltaforge_dagster.sinks.registry import SinkContext

AVRO = {"type": "avro", "schema_registry_url": "http://r"}


def config(**options: Any) -> HttpSinkConfig:
    """Return the options of a sink."""
    return HttpSinkConfig.model_validate({"id": "a", "url": "https://h/x", **options})


def test_a_file_of_deltaforge() -> None:
    """Every field that DeltaForge has is read."""
    given = config(
        required=False,
        method="PUT",
        headers={"Authorization": "Bearer geheim", "X-Source": "deltaforge"},
        batch_mode=True,
        send_timeout_secs=1.0,
        batch_timeout_secs=2.0,
        connect_timeout_secs=3.0,
        envelope="debezium",
        encoding="json",
    )

    assert given.static_headers == {"Authorization": "Bearer geheim", "X-Source": "deltaforge"}
    assert "geheim" not in given.model_dump_json() + repr(given)


def test_headers_with_variables() -> None:
    """They depend on the change; the others do not."""
    given = config(headers={"X-Table": "${source.table}", "X-Y": "a"})

    assert given.header_templates == {"X-Table": "${source.table}"}
    assert given.static_headers == {"X-Y": "a"}


@pytest.mark.parametrize(
    "url",
    ["http://h", "https://h:8443/a/${source.table}?op=${op}", "https://${tenant_id}.h/x", "http://[::1]:8080/"],
)  # fmt: skip
def test_urls(url: str) -> None:
    """Templates whose beginning is known."""
    assert config(url=url).destination == url


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "${after.url}"}, "is not a URL that starts with http:// or https:// and a host"),
        ({"url": "ftp://h/"}, "is not a URL"),
        ({"url": "https:///x"}, "is not a URL"),
        ({"url": "http://h:port/"}, "is not a URL"),
        ({"url": "http://h/a b"}, "special characters percent-encoded"),
        ({"url": "http://u:geheim@h/"}, "holds a user or a password"),
        ({"url": "http://h/#x"}, "has a part after `#`"),
        (
            {"url": "http://h/${source.tabel}"},
            "neither a field of events nor an environment variable",
        ),
        ({"method": "P OST"}, "pattern"),
        ({"headers": {"a b": "geheim"}}, "'a b', which is not the name of a header"),
        ({"headers": {"Content-Length": "geheim"}}, "holds Content-Length, which the sink sets"),
        ({"headers": {"IDEMPOTENCY-KEY": "geheim"}}, "which the sink sets itself"),
        ({"headers": {"a": "x", "A": "y"}}, "twice"),
        ({"headers": {"a": "geheim\n"}}, "a has control characters"),
        ({"headers": {"a": " geheim"}}, "blanks around"),
        ({"headers": {"a": "geheim ${TOKEN_THAT_IS_NOT_SET}"}}, "a names ${TOKEN_THAT_IS_NOT_SET}"),
        ({"headers": {"a": "geheim ${"}}, "a is no template"),
        ({"signature_header": "Idempotency-Key"}, "is another header"),
        ({"encoding": AVRO}, "a URL is no topic"),
        (
            {"encoding": {**AVRO, "subject_strategy": "record_name"}, "batch_mode": True},
            "holds one message",
        ),
        ({"headers": {"Sig": "x"}, "signature_header": "sig"}, "is another header"),
        ({"signature_secret": "${NOT_SET_ANYWHERE}"}, "needs the environment variable"),
        ({"max_in_flight": 0}, "greater than or equal to 1"),
        ({"batch_format": "xml"}, "'array' or 'ndjson'"),
        ({"tls": {"key_file": "k"}}, "needs `certificate_file`"),
    ],
)
def test_mistakes(options: dict[str, Any], problem: str) -> None:
    """Each is said where the file is read, without a secret."""
    with pytest.raises(ValidationError, match=re.escape(problem)) as caught:
        config(**options)

    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "application/json"),
        ({"batch_mode": True}, "application/json"),
        ({"batch_mode": True, "batch_format": "ndjson"}, "application/x-ndjson"),
        ({"envelope": {"type": "cloudevents", "type_prefix": "a"}}, "application/cloudevents+json"),
        ({"envelope": {"type": "cloudevents", "type_prefix": "a"}, "batch_mode": True}, "application/cloudevents-batch+json"),
    ],
)  # fmt: skip
def test_content_types(options: dict[str, Any], kind: str) -> None:
    """That of JSON, or of CloudEvents in the structured and the batched mode."""
    sink = HTTP.build(config(**options), SinkContext("shop"))

    assert sink._form.content_type == kind


@pytest.mark.parametrize(
    ("allowed", "posted", "expected"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_private_addresses(allowed: bool | None, posted: bool, expected: bool) -> None:
    """By default a file may name any host, and the REST API only public ones."""
    sink = HTTP.build(config(allow_private=allowed), SinkContext("shop", posted=posted))

    assert sink._settings.allow_private is expected
