"""Kernels and decoder against mutated real messages, with every access to memory checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.sources.postgres.connection.catalog import PostgresCatalog
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.types import CatalogType
from deltaforge_lab.servers.postgres import PostgresServer
from tests.sources.fuzzing import fuzz
from tests.sources.postgres.fuzz import Recorded, messages_of
from tests.sources.postgres.strategies import columns
from tests.sources.postgres.test_differential import ROWS, Readings

PROGRAM = "tests.sources.postgres.fuzz"

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def recorded(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real stream with values of every type, and of arrays of them."""
    stream = bytearray()
    types: dict[int, CatalogType] = {}
    feed, type_ = PostgresDecoder.feed, PostgresCatalog.type

    def recording_feed(self: PostgresDecoder, data: Any, length: int) -> Any:
        decoded = feed(self, data, length)
        stream.extend(bytes(data[: decoded.consumed]))
        return decoded

    def recording_type(self: PostgresCatalog, oid: int) -> CatalogType | None:
        found = type_(self, oid)
        if found is not None:
            types[oid] = found
        return found

    with pytest.MonkeyPatch.context() as patch, Readings(postgres_server) as readings:
        patch.setattr(PostgresDecoder, "feed", recording_feed)
        patch.setattr(PostgresCatalog, "type", recording_type)

        @settings(max_examples=1, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def write(data: st.DataObject) -> None:
            for every in (False, True):
                drawn = data.draw(columns(readings.version, ROWS, every=every))
                for at in range(0, len(drawn), 8):  # tables of a size that mutations can reach
                    readings.compare(drawn[at : at + 8])

        write()
    path = tmp_path_factory.mktemp("fuzz") / "recorded.json"
    Recorded(messages_of(bytes(stream)), types).save(path)
    return path


def test_mutated_messages(recorded: Path, tmp_path: Path, seed: int) -> None:
    """Each input gives rows of valid JSON or an error of the tree, and touches no byte outside.

    Without compilation, where NumPy checks every access: to compile the kernels with such checks takes longer.
    """
    outcomes = fuzz(PROGRAM, recorded, tmp_path, 1_000, seed, NUMBA_DISABLE_JIT="1")

    assert set(outcomes) == {"NoneType", "CorruptLog", "UnsupportedEvent"}
    assert outcomes["NoneType"] > 20


@pytest.mark.soak("fuzz")
@pytest.mark.timeout(8 * 3600)
def test_mutated_messages_at_length(recorded: Path, tmp_path: Path, seed: int) -> None:
    """As above, compiled with a check of every access, ten million times."""
    for number in range(100):
        fuzz(PROGRAM, recorded, tmp_path, 100_000, seed + 100_000 * number, NUMBA_BOUNDSCHECK="1")
