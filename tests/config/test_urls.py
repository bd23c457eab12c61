"""Which characters must be percent-encoded in a URL with a login."""

from collections.abc import Callable
from urllib.parse import quote

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.postgres_dsn import postgres_dsn
from deltaforge_dagster.config.secrets import check_encoded
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, SpecError
from deltaforge_dagster.sources.mysql.config import mysql_dsn
from deltaforge_dagster.state.legacy_storage import read_storage
from tests.config.conftest import Write

PASSWORDS = [
    "geheim@wort", "geheim/wort", "geheim#wort", "geheim?wort", "12/wort", "12?wort", "/wort", "@wort",
    "geheim@wort/geheim", "geheim/wort@geheim", "geheim@12?wort", "geheim?wort=geheim",
    "geheim@h?wort=geheim", "#",
]  # fmt: skip

URLS = [
    "postgres://u:{}@h/db",
    "postgresql://u:{}@h:5433/db?sslmode=require",
    "postgresql://:{}@h",
    "mysql://u:{}@h:3306/db",
    "mysql://u:{}@h/db?ssl-mode=REQUIRED",
]


def _refused(load: Callable[[], object], error: type[DeltaforgeError]) -> None:
    with pytest.raises(error) as caught:
        load()
    said = f"{caught.value!s}{caught.value!r}"
    assert "percent-encode" in said
    assert "geheim" not in said
    assert "wort" not in said
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("url", URLS)
def test_a_sources_password_must_be_encoded(url: str, password: str) -> None:
    """An unencoded password is rejected with a message that does not show it; an encoded one is accepted."""
    read: Callable[[str], object] = mysql_dsn if url.startswith("mysql") else postgres_dsn

    _refused(lambda: read(url.format(password)), SpecError)

    read(url.format(quote(password, safe="")))


@pytest.mark.parametrize(
    ("kind", "field", "url"),
    [
        ("redis", "uri", "redis://u:{}@h:6379/0"),
        ("redis", "uri", "rediss://:{}@h"),
        ("redis", "uri", "redis+sentinel://u:{}@h:1,i:2/main"),
        ("nats", "url", "nats://a,nats://u:{}@h:4222"),
        ("nats", "url", "nats://{}@h:4222,b"),
        ("nats", "url", "u:{}@h:4222"),
    ],
)
@pytest.mark.parametrize("password", PASSWORDS[:4])
def test_a_sinks_password_must_be_encoded(
    write: Write, kind: str, field: str, url: str, password: str
) -> None:
    """The same holds for the URL of a sink when the file is loaded."""
    others = {"redis": {"stream": "s"}, "nats": {"subject": "s"}}

    def load(text: str) -> object:
        sink = {"type": kind, "config": {"id": "x", **others[kind], field: text}}
        return load_pipeline(write({"spec.sinks.0": sink}))

    _refused(lambda: load(url.format(password)), SpecError)
    load(url.format(quote(password, safe="")))


@pytest.mark.parametrize("password", PASSWORDS[:4])
def test_the_state_stores_password_must_be_encoded(password: str) -> None:
    """The same holds for the state store's URL, and for a store from which checkpoints are imported."""
    url = f"postgresql://u:{password}@h/db"

    _refused(lambda: Settings.from_env({"DELTAFORGE_STATE_URL": url}), DeltaforgeError)
    _refused(lambda: read_storage(url), DeltaforgeError)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379/0?username=a@b",
        "redis://[::1]?username=a@b",
        "redis://h",
        "postgresql://u@/db?host=/tmp/sockets&application_name=a@b",
        "postgresql:///db?user=a@b",
        "unix:///tmp/a.sock?password=a@b",
        "redis+cluster://u:p@a:1,b:2",
        "a:4222",
        "tls://u:p@[::1]:4222",
        "mysql://u:p:q@h/db",
        "mysql://u%40x:p%2Fw@h",
    ],
)
def test_what_can_be_read_in_one_way_is_taken(url: str) -> None:
    """An `@` in an option, colons, several hosts and IPv6 addresses are accepted."""
    check_encoded(url)
