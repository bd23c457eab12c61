"""Tables by chance, compared with what a plain client of the source says in the end."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_lab.servers.clickhouse import ClickhouseServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_mysql import MysqlVersion
from tests.fix_postgres import PostgresVersion
from tests.fix_spark import SparkAddress
from tests.oracle.findings import Finding, Findings
from tests.oracle.generate import CHEAP, VERSIONS, scenario
from tests.oracle.scenario import Scenario, Source
from tests.oracle.trial import Servers, Trial, attempt

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.mysql, pytest.mark.clickhouse]


EXPLORING = 0.5
"""The part of the time in which new scenarios are tried; in the rest what was found is made smaller."""


@pytest.fixture(scope="session")
def servers(
    postgres_version: PostgresVersion,
    mysql_version: MysqlVersion,
    postgres_server: PostgresServer,
    clickhouse_server: ClickhouseServer,
    spark_server: SparkAddress,
) -> Servers:
    """Sources of every version, started when a scenario asks for them, and what the sinks need."""
    return Servers(
        postgres_version, mysql_version, postgres_server, clickhouse_server, spark_server
    )


@pytest.mark.parametrize(
    ("source", "version", "seed", "tables"),
    [
        ("postgres", "18", 2, [3]),
        ("mysql", "8.0", 1, [2, 5, 6]),
        ("mysql", "mariadb", 1, [2, 4, 5, 6]),
    ],
)
def test_chosen_tables(
    servers: Servers, source: Source, version: str, seed: int, tables: list[int]
) -> None:
    """A few tables in the newest servers that are pinned; others are chosen when the generator changes."""
    trial = attempt(scenario(seed, source, version).part(tables, CHEAP), servers)
    assert trial.differences == ()


CHOSEN = os.environ.get("DELTAFORGE_TEST_ORACLE", "")
"""Scenarios to repeat in place of new ones, with commas between: `SOURCE:SEED`, or `SOURCE:SEED:VERSION` for another server."""

MINUTES = float(os.environ.get("DELTAFORGE_TEST_ORACLE_MINUTES", "20"))
"""How long to look for differences, and to make what is found smaller."""


@pytest.mark.soak("oracle")
@pytest.mark.timeout(0)
def test_random_tables(servers: Servers, seed: int) -> None:
    """Whatever happens to tables, every sink has in the end what the source has."""
    findings = Findings(lambda one: attempt(one, servers), _show)
    began = time.monotonic()
    for made in _scenarios(seed, began + EXPLORING * 60 * MINUTES):
        trial = findings.try_out(made)
        _say(_line(findings.scenarios, made, trial))
    findings.shrink(began + 60 * MINUTES)
    assert not findings.found, "\n".join(findings.found)


def _scenarios(seed: int, until: float) -> Iterator[Scenario]:
    """Return those that are chosen, or new ones until some time."""
    for one in filter(None, CHOSEN.split(",")):
        source, number, *version = one.split(":")
        assert source in VERSIONS
        yield scenario(int(number), source, *version)
    chance = random.Random(seed)
    sources: Iterator[Source] = itertools.cycle(VERSIONS)
    while not CHOSEN and time.monotonic() < until:
        yield scenario(chance.getrandbits(32), next(sources))


def _line(number: int, made: Scenario, trial: Trial) -> str:
    return (
        f"scenario {number}: {made.source}:{made.seed}, {made.version}, {', '.join(made.sinks)}: "
        f"{len(made.steps)} steps, {trial.seconds:.0f} s, {len(trial.differences)} differences, "
        f"{len(trial.refused)} statements refused, not compared: {list(trial.excused)}"
    )


def _show(finding: Finding) -> None:
    _say(finding.text())


def _say(text: str) -> None:
    """Write at once what a long run finds, to where it was asked for as well."""
    print(text, flush=True)  # noqa: T201
    if path := os.environ.get("DELTAFORGE_TEST_ORACLE_FILE"):
        with Path(path).open("a") as file:
            file.write(text + "\n")
