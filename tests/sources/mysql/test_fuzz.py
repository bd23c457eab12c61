"""Kernels and decoder against mutated real logs, with every access to memory checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.testing.sources import take, whole
from deltaforge_lab.servers.mysql import MysqlServer
from tests.sources.fuzzing import fuzz
from tests.sources.mysql.bench import MysqlBench
from tests.sources.mysql.fuzz import events_of, save
from tests.sources.mysql.test_server_values import TYPES

PROGRAM = "tests.sources.mysql.fuzz"

pytestmark = pytest.mark.mysql


@pytest.fixture(scope="module")
def recorded(mysql_server: MysqlServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real log with values of every type: inserts, updates, deletes, partial updates."""
    stream = bytearray()
    feed = MysqlDecoder.feed

    def recording(self: MysqlDecoder, data: Any, length: int) -> Any:
        decoded = feed(self, data, length)
        stream.extend(bytes(data[: decoded.consumed]))
        return decoded

    with (
        pytest.MonkeyPatch.context() as patch,
        MysqlBench(mysql_server.create_database()) as bench,
    ):
        bench.run("SET time_zone = '+00:00'", "SET sql_mode = ''")
        bench.run("SET GLOBAL binlog_row_metadata = FULL")
        source = bench.source(tables=(f"{bench.database}.*",))
        start = source.ensure_start()
        patch.setattr(MysqlDecoder, "feed", recording)
        rows = write_everything(bench)
        take(bench, start, whole(rows), source=source)
        bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")
    path = tmp_path_factory.mktemp("fuzz") / "recorded.json"
    save(events_of(bytes(stream)), path)
    return path


def write_everything(bench: MysqlBench) -> int:
    """Change tables of a few columns each; return how many changes that were."""
    count = 0
    short = {name: [v for v in values if "0000" not in v] for name, (values, *_) in TYPES.items()}
    types = [(name, values or ["NULL"]) for name, values in short.items()]
    for at in range(0, len(types), 6):
        some = types[at : at + 6]
        declared = ", ".join(f"c{i} {name}" for i, (name, _) in enumerate(some))
        bench.run(f"CREATE TABLE f{at} (id int PRIMARY KEY, {declared})")
        for line in range(2):
            values = ", ".join(values[line % len(values)] for _, values in some)
            bench.execute(f"INSERT INTO f{at} VALUES ({line}, {values})")
        bench.execute(f"UPDATE f{at} SET id = id + 5")
        bench.execute(f"DELETE FROM f{at}")
        count += 6
    bench.run(
        "SET SESSION binlog_row_value_options = PARTIAL_JSON",
        "CREATE TABLE d (id int PRIMARY KEY, a json, b json)",
    )
    long = f"JSON_OBJECT('k', 1, 'l', '{'x' * 60}', 'n', JSON_ARRAY(1, 2.5, NULL))"
    bench.execute(f"INSERT INTO d VALUES (1, {long}, {long})")
    bench.execute("UPDATE d SET a = JSON_SET(a, '$.n[1]', 7), b = JSON_REMOVE(b, '$.k')")
    return count + 2


def test_mutated_logs(recorded: Path, tmp_path: Path, seed: int) -> None:
    """Each input gives rows of valid JSON or an error of the tree, and touches no byte outside.

    Without compilation, where NumPy checks every access: to compile the kernels with such checks takes longer.
    """
    outcomes = fuzz(PROGRAM, recorded, tmp_path, 1_000, seed, NUMBA_DISABLE_JIT="1")

    assert set(outcomes) >= {"rows", "CorruptLog", "UnsupportedEvent"}
    assert outcomes["rows"] > 10


@pytest.mark.soak("fuzz")
@pytest.mark.timeout(8 * 3600)
def test_mutated_logs_at_length(recorded: Path, tmp_path: Path, seed: int) -> None:
    """As above, compiled with a check of every access, ten million times."""
    for number in range(100):
        fuzz(PROGRAM, recorded, tmp_path, 100_000, seed + 100_000 * number, NUMBA_BOUNDSCHECK="1")
