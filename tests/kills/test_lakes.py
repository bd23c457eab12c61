"""Runs that write lake tables are killed, and so is Spark, while rows, keys and columns change and the table is emptied.

Whenever the table is read, it is what the source was after one of its transactions; in the end it is what the source is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.installation.lake_jars import LAKE_JARS
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.failpoints import FAILPOINTS
from deltaforge_lab.bench.cost.processes import descendants, usages
from deltaforge_lab.servers.maven import fetch
from tests.fix_spark import SparkAddress
from tests.kills.campaign import Campaign
from tests.kills.ends import Database
from tests.kills.lakes import Checker, Format, LakeDestination, Mode
from tests.kills.test_kills import STEPS

pytestmark = [
    pytest.mark.spark,
    pytest.mark.soak("kills"),
    pytest.mark.timeout(3600),
    pytest.mark.parametrize(
        "source",
        [
            pytest.param("postgres", marks=pytest.mark.postgres),
            pytest.param("mysql", marks=pytest.mark.mysql),
        ],
    ),
    pytest.mark.parametrize("format_", ["delta", "iceberg"]),
]
MODES = pytest.mark.parametrize("mode", ["current", "changelog", "history"])

MakeLake = Callable[[Mode], tuple[Campaign, Checker]]


@pytest.fixture
def make_lake(
    source: str,
    format_: Format,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    seed: int,
) -> Iterator[MakeLake]:
    """Make a campaign from an empty database to a table."""
    made: list[Campaign] = []
    spark: SparkAddress = request.getfixturevalue("spark_server")
    database: Database = request.getfixturevalue(f"{source}_end")

    def make(mode: Mode) -> tuple[Campaign, Checker]:
        destination = LakeDestination(format_, mode, tmp_path / "lake", spark)
        campaign = Campaign(
            tmp_path, database, destination, True, spark, seed, moves=True, reshapes=True
        )
        made.append(campaign)
        return campaign, Checker(destination, campaign.workload)

    yield make
    for one in made:
        one.close()


@MODES
def test_killed_at_every_step(make_lake: MakeLake, mode: Mode) -> None:
    """Before, between and after the writes of a commit."""
    campaign, checker = make_lake(mode)
    steps = [one for one in FAILPOINTS if one in {*STEPS, *campaign.destination.steps}]
    campaign.rng.shuffle(steps)
    with campaign.under_load():
        for step in steps:
            campaign.kill_at(f"{step}:{campaign.rng.randint(1, 3)}")
            checker.check_prefix()
    campaign.catch_up()

    checker.check_all(campaign.database.rows())


@MODES
def test_killed_at_random(make_lake: MakeLake, mode: Mode) -> None:
    """Twenty times; the table is read after every one."""
    campaign, checker = make_lake(mode)
    with campaign.under_load():
        for _ in range(20):
            campaign.kill_at_random()
            checker.check_prefix()
    campaign.catch_up()

    checker.check_all(campaign.database.rows())


def test_killed_tasks(make_lake: MakeLake, spark_server: SparkAddress) -> None:
    """Python workers of Spark are killed while a run delivers, which goes on, or is followed by one that does."""
    assert spark_server.folder is not None
    campaign, checker = make_lake("current")
    with campaign.under_load():
        run = campaign.begin_and_deliver()
        for _ in range(10):
            now, java = usages(), java_of(spark_server.folder)
            daemons = [one for one, usage in now.items() if usage.parent == java]
            for daemon in daemons:
                for worker in descendants(now, daemon)[1:]:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(worker, signal.SIGKILL)
            run = campaign.deliver_more(run)
            checker.check_prefix()
        campaign.end(run)
    campaign.catch_up()

    checker.check_all(campaign.database.rows())


def test_killed_servers(make_lake: MakeLake, tmp_path: Path) -> None:
    """Spark's server is killed while a run delivers, five times."""
    campaign, checker = make_lake("current")
    home = campaign.settings.home
    (home / "spark").unlink()  # that of the tests
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in fetch(LAKE_JARS):
        (jars / jar.name).symlink_to(jar)
    campaign.environment["DELTAFORGE_LAKE_JARS"] = str(jars)
    try:
        with campaign.under_load():
            run = campaign.begin_and_deliver()
            for _ in range(5):
                os.kill(java_of(home / "spark"), signal.SIGKILL)
                run = campaign.deliver_more(run)
                checker.check_prefix()
            campaign.end(run)
        campaign.catch_up()
    finally:
        SparkServer.ensure(home).stop()

    checker.check_all(campaign.database.rows())


def java_of(folder: Path) -> int:
    """Return the process of the server whose files are in a folder."""
    watcher = json.loads((folder / "server.json").read_bytes())["pid"]
    children = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    (java,) = [one for one in children if Path(f"/proc/{one}/comm").read_text().strip() == "java"]
    return int(java)
