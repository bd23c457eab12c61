"""`encoding: avro`: what a file may say, and what makes no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.sinks import AvroEncoding, MessageSinkConfig
from deltaforge_dagster.errors import SpecError
from tests.config.conftest import Write

AVRO = {"type": "avro", "schema_registry_url": "https://r:8081/path", "enum_mode": "enum"}
WHERE = "spec.sinks.0.config.encoding"
SHOWN = "spec.sinks[0].config.encoding"


OAUTH = {
    "oauth_token_url": "https://i/token?p=1",
    "oauth_client_id": "df",
    "oauth_client_secret": "geheim",
}


def test_a_whole_block(write: Write) -> None:
    """Every field is read, and the password is never shown."""
    login = {"username": "me", "password": "geheim", "ca_file": "/ca.pem"}
    loaded = load_pipeline(write({WHERE: {**AVRO, **login}}))

    config = loaded.spec.spec.sinks[0].config
    assert isinstance(config, MessageSinkConfig)
    assert isinstance(config.encoding, AvroEncoding)
    assert config.encoding.subject_strategy == "topic_name"
    assert loaded.warnings == ()
    masked = loaded.spec.masked()
    assert masked["spec"]["sinks"][0]["config"]["encoding"]["password"] == "***"
    assert "geheim" not in json.dumps(masked) + repr(loaded)


def test_oauth(write: Write) -> None:
    """The secret is one: it is never shown, and a change of it is noticed. Files are for whichever of the URLs has TLS."""
    cloud = {"oauth_logical_cluster": "lsrc-1", "oauth_identity_pool": "pool-1,pool-2"}
    files = {"ca_file": "/ca.pem", "certificate_file": "/c.pem", "key_file": "/k.pem"}
    plain = {"schema_registry_url": "http://r"}
    loaded = load_pipeline(write({WHERE: AVRO | OAUTH | cloud | files | plain}))

    assert loaded.warnings == ()
    shown = loaded.spec.masked()["spec"]["sinks"][0]["config"]["encoding"]
    assert {name: shown[name] for name in (*OAUTH, *cloud, *files)} == (
        OAUTH | cloud | files | {"oauth_client_secret": "***"}
    )
    assert "geheim" not in json.dumps(loaded.spec.masked()) + repr(loaded)
    secrets = loaded.spec.secrets()
    assert secrets["spec.sinks[cache].config.encoding.oauth_client_secret"] == "geheim"


def test_debezium_is_the_same_record(write: Write) -> None:
    """A file with this envelope loads."""
    load_pipeline(write({WHERE: AVRO, "spec.sinks.0.config.envelope": "debezium"}))


def test_several_tables_in_one_subject(write: Write) -> None:
    """A topic with several tables causes a warning, unless subjects are named after records."""
    tables = {"spec.source.config.tables": ["public.*"], WHERE: AVRO}
    (warning,) = load_pipeline(write(tables)).warnings
    assert f"{SHOWN}.subject_strategy: topic_name makes the schemas of all tables" in warning

    for change in (
        {"spec.source.config.tables": ["public.orders"]},
        {"spec.sinks.0.config.stream": "s.${source.table}"},
        {WHERE: {**AVRO, "subject_strategy": "topic_record_name"}},
    ):
        assert load_pipeline(write({**tables, **change})).warnings == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({WHERE: "avro"}, f"{SHOWN}.schema_registry_url: is required"),
        ({WHERE: AVRO | {"subject_strategy": "x"}}, f"{SHOWN}.subject_strategy: must be 'topic_name', 'record_name' or 'topic_record_name'"),
        ({WHERE: AVRO | {"schema_registry_url": "r:8081"}}, f"{SHOWN}.schema_registry_url: is not the address of a registry"),
        ({WHERE: AVRO | {"schema_registry_url": "http://u:geheim@r"}}, f"{SHOWN}.schema_registry_url: contains a user"),
        ({WHERE: AVRO | {"username": "u"}}, f"{SHOWN}: needs both `username` and `password`"),
        ({WHERE: AVRO | {"schema_registry_url": "http://r", "ca_file": "/a"}}, f"{SHOWN}: `ca_file` needs a schema_registry_url that begins with https:"),
        ({WHERE: AVRO | {"schema_registry_url": "http://r", "certificate_file": "/a"}}, f"{SHOWN}: `certificate_file` needs a schema_registry_url that begins with https:"),
        ({WHERE: AVRO | {"key_file": "/a"}}, f"{SHOWN}: `key_file` needs `certificate_file`"),
        ({WHERE: AVRO | OAUTH | {"username": "u", "password": "p"}}, f"{SHOWN}: has two logins"),
        ({WHERE: AVRO | {"oauth_token_url": "https://i", "oauth_client_id": "df"}}, f"{SHOWN}: needs `oauth_token_url`, `oauth_client_id` and `oauth_client_secret`"),
        ({WHERE: AVRO | {"oauth_scope": "a"}}, f"{SHOWN}: needs `oauth_token_url`, `oauth_client_id` and `oauth_client_secret`"),
        ({WHERE: AVRO | {"username": "u", "password": "p", "oauth_identity_pool": "a"}}, f"{SHOWN}: needs `oauth_token_url`"),
        ({WHERE: AVRO | OAUTH | {"oauth_token_url": "i/token"}}, f"{SHOWN}.oauth_token_url: is not the address of a token endpoint"),
        ({WHERE: AVRO | OAUTH | {"oauth_token_url": "https://[i"}}, f"{SHOWN}.oauth_token_url: is not the address of a token endpoint"),
        ({WHERE: AVRO | OAUTH | {"oauth_token_url": "https://u:geheim@i"}}, f"{SHOWN}.oauth_token_url: contains a user"),
        ({WHERE: AVRO | OAUTH | {"oauth_client_secret": ""}}, f"{SHOWN}.oauth_client_secret: is empty"),
        ({WHERE: AVRO | OAUTH | {"oauth_logical_cluster": "a b"}}, f"{SHOWN}.oauth_logical_cluster: may have only"),
        ({WHERE: AVRO, "spec.sinks.0.config.envelope": {"type": "cloudevents", "type_prefix": "a"}}, "spec.sinks[0].config: encoding avro: a CloudEvent is JSON"),
        ({"spec.sinks.1.config.encoding": AVRO}, "spec.sinks[1].config: encoding avro: messages of this kind of sink are text"),
    ],
)  # fmt: skip
def test_mistakes(write: Write, changes: dict[str, Any], expected: str) -> None:
    """Each is one problem, at its place, without a secret."""
    path = write(changes)
    with pytest.raises(SpecError) as caught:
        load_pipeline(path)

    (problem,) = caught.value.problems
    assert problem.partition(": ")[2].startswith(expected)
    assert "geheim" not in problem
