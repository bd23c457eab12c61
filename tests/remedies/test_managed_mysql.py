"""The first hour with Amazon RDS for MySQL, on a server that behaves like it: what the docs say, then what goes wrong."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from deltaforge_lab.servers.mysql_service import MysqlServiceServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.command import Command
from tests.e2e.deployment import Deployment, eventually
from tests.fix_mysql import FAST
from tests.sinks.certificates import certificate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.postgres,
    pytest.mark.timeout(900),
    pytest.mark.soak("managed"),
]

NAME = "shop"
PIPELINE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: shop, dsn: "{dsn}", tables: [shop.orders]}}}}
  sinks:
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", table: "copied.${{source.table}}", commit_seconds: 0.1}}}}
  engine: {{run: {{idle_seconds: 600, lease_seconds: 20, renew_seconds: 1}}}}
"""
DOCS = Path(__file__).parents[2] / "docs"
SERVICE = "Amazon RDS for MySQL"


def documented(language: str) -> str:
    """Return the block of the service's section in the docs that is in this language."""
    texts = [path.read_text() for path in DOCS.glob("managed-databases*.md")]
    (section,) = [
        text.partition(f"\n### {SERVICE}\n")[2] for text in texts if f"\n### {SERVICE}\n" in text
    ]
    (block,) = re.findall(f"```{language}\n(.*?)\n```", section.partition("\n### ")[0], re.DOTALL)
    return str(block)


@dataclass
class FirstHour:
    """A pipeline over one table of an instance, into a table of PostgreSQL.

    Attributes:
        instance: The instance.
        deployment: The pipeline's folder.
        copy: The database of the sink.
    """

    instance: MysqlServiceServer
    deployment: Deployment
    copy: str

    def deltaforge(self, *arguments: str) -> Command:
        """Execute a command; it may fail."""
        command = self.deployment.command(*arguments)
        command.wait()
        return command

    def run(self) -> None:
        """Run the pipeline until it has caught up; after a kill that has to wait for the lease."""
        eventually(
            lambda: self.deltaforge("run", NAME, "--until-caught-up").process.exitcode == 0,
            what="the run",
        )

    def check(self) -> list[dict[str, Any]]:
        """Return what `deltaforge check` calls an error or a warning; no remedy may be one that the service refuses."""
        shown = json.loads(self.deltaforge("check", NAME, "--json").last_line)
        assert not re.search("SET (GLOBAL|PERSIST)", str(shown))
        return [one for one in shown["findings"] if one["level"] in {"error", "warning"}]

    def insert(self, *ids: int) -> None:
        """Insert rows, as the application does."""
        self.instance.execute(*(f"INSERT INTO shop.orders VALUES ({one}, 'v{one}')" for one in ids))

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows of the sink's table."""
        with psycopg.connect(self.copy) as connection:
            return connection.execute("SELECT id, v FROM copied.orders ORDER BY id").fetchall()

    def source(self) -> list[tuple[Any, ...]]:
        """Return the rows of the instance's table."""
        return self.instance.execute("SELECT id, v FROM shop.orders ORDER BY id")


@pytest.fixture
def hour(
    tmp_path: Path, deploy: Callable[..., Deployment], postgres_server: PostgresServer
) -> Iterator[FirstHour]:
    """A new instance with a table and nothing for capture; a pipeline whose DSN is that of the docs."""
    cert, key = certificate(tmp_path, for_old=True)
    with MysqlServiceServer.start(cert, key, FAST) as instance:
        instance.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.orders (id INT PRIMARY KEY, v TEXT)"
        )
        hour = FirstHour(instance, deploy(), postgres_server.create_database())
        dsn = documented("yaml").removeprefix("dsn: ").replace("/etc/deltaforge/rds.pem", str(cert))
        host, port = instance.address
        dsn = re.sub("@.*:3306/", f"@{host}:{port}/", dsn)
        hour.deployment.add(NAME, PIPELINE.format(dsn=dsn, copy=hour.copy))
        yield hour


def test_the_first_hour(hour: FirstHour) -> None:
    """What the page says is enough; a kill, a failover and a log that is removed lose nothing."""
    instance = hour.instance
    instance.execute(*documented("sql").removesuffix(";").split(";\n"))
    (wrong,) = [one for one in hour.check() if one["subject"] == "log settings"]
    assert (
        "binlog_format is MIXED; set binlog_format to ROW in the DB parameter group"
        in wrong["text"]
    )
    parameters = dict(line.split(" = ") for line in documented("ini").splitlines())
    instance.set_parameters({name.replace("-", "_"): one for name, one in parameters.items()})
    assert hour.check() == []

    hour.run()  # a pipeline begins when it runs for the first time
    hour.insert(1, 2)
    hour.run()
    running = hour.deployment.command("run", NAME)
    ids = iter(range(10, 10_000))
    while not any(row[0] >= 10 for row in hour.rows()):
        hour.insert(next(ids))
    running.kill()
    hour.insert(next(ids))
    hour.run()
    assert hour.rows() == hour.source()

    instance.add_standby()
    instance.delay_standby()
    hour.insert(20_000)
    hour.run()
    ((executed,),) = instance.execute("SELECT @@GLOBAL.gtid_executed")
    eventually(lambda: instance.standby_has(executed), what="the standby has the log")
    instance.fail_over()
    waiting = hour.deployment.command("run", NAME, "--until-caught-up")
    eventually(lambda: "read-only" in waiting.output, what="the run waits for the failover")
    instance.promote()
    hour.insert(20_001)
    assert waiting.wait() == 0
    hour.run()
    assert hour.rows() == hour.source()
    assert hour.check() == []

    instance.execute("CALL mysql.rds_set_configuration('binlog retention hours', NULL)")
    (unsafe,) = hour.check()
    assert (unsafe["subject"], unsafe["level"]) == ("retention", "error")
    hour.insert(30_000)
    instance.remove_log()
    assert hour.deltaforge("run", NAME, "--until-caught-up").process.exitcode != 0
    shown = json.loads(hour.deltaforge("status", "--json").last_line)["pipelines"]
    (lost,) = [one for one in shown[0]["problems"] if one["severity"] == "error"]
    assert "Re-snapshot required" in lost["text"]
    instance.execute(unsafe["mend"])
    for command in lost["remedy"]:
        done = hour.deltaforge(*shlex.split(command)[1:])
        assert done.process.exitcode == 0, done.output
    for _ in range(3):
        hour.run()
    assert hour.rows() == hour.source()
    assert hour.check() == []
