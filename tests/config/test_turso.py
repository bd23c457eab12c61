"""The `turso` source of a pipeline file: where its database is, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.turso.source_type import (
    DatabaseFile,
    DatabaseServer,
    TursoSourceConfig,
    database_place,
)
from tests.config.conftest import Write

TURSO = {
    "id": "shop",
    "url": "libsql://db.turso.io",
    "auth_token": "geheim",
    "tables": ["*"],
    "cdc_mode": "native",
    "native_cdc": {"level": "data"},
    "poll_interval_ms": 500,
    "tracking_column": "_rowid_",
}


def source(**changes: Any) -> dict[str, Any]:
    """Return changes that replace the file's source with a Turso source; None removes a field."""
    config = {name: value for name, value in (TURSO | changes).items() if value is not None}
    return {"spec.source": {"type": "turso", "config": config}}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("libsql://db.turso.io", DatabaseServer("https://db.turso.io")),
        ("libsql://127.0.0.1:8080?tls=0", DatabaseServer("http://127.0.0.1:8080")),
        ("http://[::1]:8080/", DatabaseServer("http://[::1]:8080")),
        ("https://host/path/", DatabaseServer("https://host/path")),
        ("file:///data/shop.db", DatabaseFile(Path("/data/shop.db"))),
        ("file:shop%20a.db", DatabaseFile(Path("shop a.db"))),
        ("data/shop.db", DatabaseFile(Path("data/shop.db"))),
    ],
)
def test_places(url: str, place: object) -> None:
    """URLs mean the same as in Turso's clients; anything without a scheme is a path."""
    assert database_place(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "libsql://u:geheim@host",
        "https://host?authToken=geheim",
        "libsql://host?geheim=1",
        "ws://geheim",
        "postgres://geheim",
        "https://",
        "http://host:geheim",
        "file:",
        "file://host/geheim",
        "file:geheim?mode=ro",
        ":memory:",
    ],
)
def test_what_is_no_database_is_refused_without_repeating_it(url: str) -> None:
    """A URL may contain a token in the wrong place, so the message quotes nothing of it."""
    with pytest.raises(SpecError) as caught:
        database_place(url)

    assert "geheim" not in str(caught.value)


def test_a_sound_source(write: Write) -> None:
    """DeltaForge's fields, even those of older versions, are read; the token is never shown."""
    old = {"native_cdc_level": "after", "auto_create_triggers": True, "batch_size": 10}
    loaded = load_pipeline(write(source(**old)))

    assert isinstance(loaded.spec.spec.source.config, TursoSourceConfig)
    assert not loaded.warnings
    assert "geheim" not in str(loaded.spec.masked())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"url": None}, "url: is required"),
        ({"url": "ws://h"}, "url: has an unknown scheme"),
        ({"tables": None}, "tables: is required"),
        ({"tables": ["main.orders"]}, "tables[0]: is not a table pattern"),
        ({"tables": ["*_orders"]}, "tables[0]: is not a table pattern"),
        ({"cdc_mode": "fast"}, "cdc_mode: must be 'auto', 'native', 'triggers' or 'polling'"),
        ({"native_cdc": {"level": "x"}}, "native_cdc.level: must be 'data' or 'binlog'"),
        ({"native_cdc_level": "id"}, "native_cdc_level: id leaves new rows out"),
        ({"poll_interval_ms": 0}, "poll_interval_ms: must be more than 0"),
        ({"auth_token": "${NOT_SET_ANYWHERE}"}, "auth_token: needs the environment variable"),
    ],
)
def test_mistakes_are_named_at_their_place(
    write: Write, changes: dict[str, Any], expected: str
) -> None:
    """Each problem has its path and says what to write instead."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(write(source(**changes)))

    (problem,) = caught.value.problems
    assert f"spec.source.config.{expected}" in problem


def test_a_seed_is_a_position_of_this_source(write: Write) -> None:
    """A new pipeline may start at the number of a change; a position of another source type is rejected."""
    sound = {"spec.engine.checkpoint": {"seed": {"type": "position", "position": {"mode": "native", "last_change_id": 7}}}}  # fmt: skip
    load_pipeline(write(source() | sound))
    foreign = {"spec.engine.checkpoint": {"seed": {"type": "position", "position": {"lsn": "0/1"}}}}

    with pytest.raises(SpecError, match="another kind of source"):
        load_pipeline(write(source() | foreign))
