"""Where a new pipeline begins: imported checkpoints, seeds, and what happens to wrong ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import PositionLost, SettingsError
from deltaforge_dagster.pipeline.control.first_start import FirstStart, first_start
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.store import StateStore

POSTGRES = (
    "{type: postgres, config: {id: src, dsn: 'postgres://u@h/d', slot: s, publication: p,"
    " tables: [public.t]}}"
)
MYSQL = "{type: mysql, config: {id: src, dsn: 'mysql://u@h/d'}}"


def pipeline(folder: Path, source: str = POSTGRES, seed: str = "none") -> LoadedPipeline:
    """Return a pipeline with the sinks a, b and c."""
    path = folder / "p.yaml"
    sinks = ", ".join(f"{{type: file, config: {{id: {one}, path: /tmp/{one}}}}}" for one in "abc")
    path.write_text(
        f"metadata: {{name: p, tenant: acme}}\nspec:\n  source: {source}\n  sinks: [{sinks}]\n"
        f"  engine: {{checkpoint: {{seed: {seed}}}}}\n"
    )
    return load_pipeline(path)


def put(store: StateStore, found: Mapping[str, object]) -> None:
    """Store checkpoints as an import does."""
    for key, value in found.items():
        text = value if isinstance(value, str) else json.dumps(value)
        Kv(store.database, legacy.NAMESPACE).put(key, text.encode())


def lsn(number: int) -> dict[str, object]:
    """Return a position of PostgreSQL as DeltaForge writes it."""
    return {"lsn": f"0/{number:X}", "tx_id": 7}


def test_nothing_says_anything(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Then the source's own rule counts; checkpoints of other sources are nothing."""
    put(sqlite_store, {"other": lsn(1), "src-2": lsn(1), "src-2::sink::a": lsn(1)})

    assert first_start(sqlite_store, pipeline(tmp_path)) == FirstStart()


def test_the_minimum_of_the_sinks(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Those that are further have their own; the plain key, and removed sinks, do not count."""
    found = {"src": lsn(1), "src::sink::a": lsn(0x30), "src::sink::b": lsn(0x20)}
    put(sqlite_store, {**found, "src::sink::gone": lsn(0x10)})

    first = first_start(sqlite_store, pipeline(tmp_path))

    assert first.at == LsnPosition(0x20)
    assert first.has == {"a": LsnPosition(0x30, 7).to_json()}


def test_the_plain_key(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Without a key of any sink it counts for all of them."""
    put(sqlite_store, {"src": lsn(0x20)})

    assert first_start(sqlite_store, pipeline(tmp_path)) == FirstStart(LsnPosition(0x20))


def test_mysqls_gtid_set_is_left_out(sqlite_store: StateStore, tmp_path: Path) -> None:
    """It has the transaction that the offset is inside of; files compare by number."""
    sid = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
    put(
        sqlite_store,
        {
            "src::sink::a": {"file": "bin.000009", "pos": 900, "gtid_set": f"{sid}:1-9"},
            "src::sink::b": {"file": "bin.000010", "pos": 4, "gtid_set": f"{sid}:1-10"},
        },
    )

    first = first_start(sqlite_store, pipeline(tmp_path, MYSQL))

    assert first.at is not None
    assert first.at.to_json() == '{"file": "bin.000009", "pos": 900, "gtid_set": null}'
    assert first.has == {"b": BinlogPosition("bin.000010", 4).to_json()}


@pytest.mark.parametrize("value", ["", "{", "[]", "17", '{"lsn": 5}', '{"file": "b.1", "pos": 4}'])
def test_a_corrupt_checkpoint(sqlite_store: StateStore, tmp_path: Path, value: str) -> None:
    """Stops with its key and the way out, instead of beginning at the log's end."""
    put(sqlite_store, {"src::sink::a": lsn(5), "src::sink::b": value})

    with pytest.raises(PositionLost, match=r"checkpoint src::sink::b .* import p --forget"):
        first_start(sqlite_store, pipeline(tmp_path))


def test_a_seed_is_a_position(sqlite_store: StateStore, tmp_path: Path) -> None:
    """In the file itself or in one that it names; an imported checkpoint comes first."""
    path = tmp_path / "position.json"
    path.write_text('{"lsn": "1/A0"}\n')
    by_path = pipeline(tmp_path, seed=f"{{type: position, path: {path}}}")
    here = '{type: position, position: {file: bin.000003, pos: 40, gtid_set: ""}}'

    assert first_start(sqlite_store, by_path).at == LsnPosition((1 << 32) + 0xA0)
    assert first_start(sqlite_store, pipeline(tmp_path, MYSQL, here)).at == BinlogPosition(
        "bin.000003", 40, ""
    )
    put(sqlite_store, {"src": lsn(0x20)})
    assert first_start(sqlite_store, by_path).at == LsnPosition(0x20)


@pytest.mark.parametrize("content", ["", "0/20", '{"file": "b.1", "pos": 4}', None])
def test_a_seed_that_is_none(sqlite_store: StateStore, tmp_path: Path, content: str | None) -> None:
    """Stops: nothing else is meant by it."""
    path = tmp_path / "position.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(SettingsError, match=r"position\.json, "):
        first_start(sqlite_store, pipeline(tmp_path, seed=f"{{type: position, path: {path}}}"))


def test_a_chaser_file(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Its 8 bytes, little-endian, are an LSN."""
    path = tmp_path / "chaser.chk"
    path.write_bytes(bytes([0x50, 0x6C, 0x6B, 0x01, 2, 0, 0, 0]))
    loaded = pipeline(tmp_path, seed=f"{{type: chaser, path: {path}}}")

    assert first_start(sqlite_store, loaded).at == LsnPosition((2 << 32) + 0x16B6C50)


@pytest.mark.parametrize("content", [b"", b"1234567", b"123456789", b"\xff" * 8, None])
def test_a_chaser_file_that_is_none(
    sqlite_store: StateStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    """Says so, and the pipeline begins as without it."""
    path = tmp_path / "chaser.chk"
    if content is not None:
        path.write_bytes(content)
    loaded = pipeline(tmp_path, seed=f"{{type: chaser, path: {path}}}")

    with caplog.at_level(logging.WARNING):
        assert first_start(sqlite_store, loaded) == FirstStart()
    assert "begins without it" in caplog.text
