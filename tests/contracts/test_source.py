"""Each source keeps the promises of every source, proved with a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltaforge_dagster.testing.sources import Bench, SourceContract
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench
from tests.sources.turso.bench import NativeBench, TriggerBench


@pytest.fixture(
    params=[
        pytest.param((PostgresBench, None), marks=pytest.mark.postgres, id="postgres"),
        pytest.param((MysqlBench, "8.0"), marks=pytest.mark.mysql, id="mysql"),
        pytest.param((MysqlBench, "5.7"), marks=pytest.mark.mysql, id="mysql 5.7"),
        pytest.param((MysqlBench, "mariadb"), marks=pytest.mark.mysql, id="mariadb"),
        pytest.param(
            (MysqlBench, "mariadb 10.11"),
            marks=[pytest.mark.mysql, pytest.mark.soak("versions")],
            id="mariadb 10.11",
        ),
        pytest.param(
            (MysqlBench, "mariadb 10.5"),
            marks=[pytest.mark.mysql, pytest.mark.soak("versions")],
            id="mariadb 10.5",
        ),
        pytest.param(
            (MysqlBench, "9.7"),
            marks=[pytest.mark.mysql, pytest.mark.soak("versions")],
            id="mysql 9",
        ),
        pytest.param((NativeBench, "file"), id="turso"),
        pytest.param((TriggerBench, "file"), id="sqlite triggers"),
    ]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """One bench per kind of source, and more for other logs of that kind."""
    kind, version = request.param
    if version == "file":
        dsn = request.getfixturevalue("tmp_path") / "shop.db"
    elif version is None:
        dsn = request.getfixturevalue("postgres_dsn")
    elif version == "8.0":
        dsn = request.getfixturevalue("mysql_dsn")
    else:
        dsn = request.getfixturevalue("mysql_version")(version).create_database()
    with kind(dsn) as made:
        yield made


class TestSource(SourceContract):
    """Every source, over the bench of its kind."""
