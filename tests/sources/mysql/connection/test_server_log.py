"""Servers whose log cannot be read, of which no registry has one: by what their documentation says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pymysql
import pytest

from deltaforge_dagster.errors import SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession

WHERE = "MySQL db:3306"


class Said(MysqlSession):
    """A session of a server that says this version and has these variables."""

    def __init__(self, version: str, **variables: str) -> None:
        super().__init__(cast("pymysql.Connection[Any]", SimpleNamespace(host="db")))
        self._version = version
        self._variables = variables

    @property
    def server_version(self) -> str:
        """The version of the server's greeting."""
        return self._version

    def rows(self, statement: str, *parameters: object) -> list[dict[str, Any]]:
        """Return the variables, whatever is asked."""
        del statement, parameters
        return [{"Variable_name": name, "Value": value} for name, value in self._variables.items()]


def test_planetscale_shows_its_log_to_nobody() -> None:
    """Vitess speaks MySQL's protocol without its replication, so nothing that one grants or sets would help."""
    with pytest.raises(
        SourceMisconfigured, match=r"PlanetScale \(Vitess\).*no client its binary log"
    ):
        server_log.facts(Said("8.0.30-Vitess"), WHERE)


def test_a_log_inside_of_innodb() -> None:
    """MariaDB 12.3 can keep its log in another format; the usual one is read."""
    version = "12.3.1-MariaDB-log"
    with pytest.raises(
        SourceMisconfigured, match=r"does not read the binary log .* inside of innodb"
    ):
        server_log.facts(Said(version, log_bin="ON", binlog_storage_engine="innodb"), WHERE)
    for usual in ("", "NONE"):
        assert server_log.facts(Said(version, binlog_storage_engine=usual), WHERE).gtids


def test_a_reader_of_aurora() -> None:
    """It has no log; the cluster's name may lead to one for a moment after a failover, so that is tried again."""
    reader = {"aurora_version": "3.08.0", "log_bin": "OFF", "innodb_read_only": "ON"}
    with pytest.raises(SourceUnavailable, match="the cluster's writer endpoint"):
        server_log.facts(Said("8.0.39", **reader), WHERE)
    writer = reader | {"innodb_read_only": "OFF"}
    with pytest.raises(SourceMisconfigured, match="in the DB cluster parameter group, and reboot"):
        server_log.facts(Said("8.0.39", **writer), WHERE)


@pytest.mark.parametrize(
    ("version", "service", "advice"),
    [
        ("8.0.31-google", {}, "; set binlog_format to ROW in the instance's flags"),
        ("8.0.42-azure", {}, "; set binlog_format to ROW in the server parameters"),
        ("8.0.36", {"datadir": "/rdsdbdata/db/"}, "; set binlog_format to ROW in the DB parameter"),
        ("8.0.36", {"datadir": "/var/lib/mysql/"}, "; run: SET PERSIST binlog_format = ROW"),
    ],
)
def test_a_format_is_changed_where_the_service_has_it(
    version: str, service: dict[str, str], advice: str
) -> None:
    """No service accepts `SET PERSIST`; a server of one's own does."""
    with pytest.raises(SourceMisconfigured) as caught:
        server_log.facts(Said(version, binlog_format="MIXED", **service), WHERE)
    assert f"binlog_format is MIXED{advice}" in str(caught.value)
    assert ("SET PERSIST" in str(caught.value)) == ("run" in advice)
