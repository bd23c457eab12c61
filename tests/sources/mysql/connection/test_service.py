"""Which service runs a server, by what its documentation says of versions, variables, files and hosts."""

from __future__ import annotations

import pytest

from deltaforge_dagster.sources.mysql.connection.service import SELF_MANAGED, SERVICES, recognize

PLAIN = {"basedir": "/usr/", "datadir": "/var/lib/mysql/"}
RDS = {"basedir": "/rdsdbbin/mysql-8.0.36.R1/", "datadir": "/rdsdbdata/db/"}
AURORA = {"basedir": "/rdsdbbin/oscar-8.0.mysql_aurora.3.08.0/", "aurora_version": "3.08.0"}


@pytest.mark.parametrize(
    ("name", "version", "variables", "host"),
    [
        ("", "8.0.36", PLAIN, "db.example.com"),
        ("", "5.5.5-10.11.6-MariaDB-log", PLAIN, "10.0.0.1"),
        ("Amazon RDS for MySQL", "8.0.36", RDS, "10.0.0.1"),
        ("Amazon RDS for MySQL", "8.0.36", {}, "shop.abc123.eu-west-1.rds.amazonaws.com"),
        ("Amazon RDS for MariaDB", "5.5.5-10.11.6-MariaDB-log", RDS, "10.0.0.1"),
        ("Amazon Aurora MySQL", "8.0.39", AURORA, "10.0.0.1"),
        (
            "Amazon Aurora MySQL",
            "8.0.39",
            {},
            "shop.cluster-abc123.eu-west-1.rds.amazonaws.com",
        ),
        ("Google Cloud SQL for MySQL", "8.0.31-google", PLAIN, "10.0.0.1"),
        (
            "Google Cloud SQL for MySQL",
            "8.0.31",
            {**PLAIN, "cloudsql_iam_authentication": "OFF"},
            "10.0.0.1",
        ),
        ("Azure Database for MySQL", "8.0.42-azure", PLAIN, "10.0.0.1"),
        ("Azure Database for MySQL", "8.0.37", PLAIN, "shop.mysql.database.azure.com"),
        ("PlanetScale (Vitess)", "8.0.30-Vitess", {}, "aws.connect.psdb.cloud"),
        ("PlanetScale (Vitess)", "8.0.30-Vitess", {}, "127.0.0.1"),
        (
            "DigitalOcean Managed MySQL",
            "8.0.35",
            PLAIN,
            "db-mysql-ams3-1-do-user-1-0.b.db.ondigitalocean.com",
        ),
    ],
)
def test_a_service_is_recognized(
    name: str, version: str, variables: dict[str, str], host: str
) -> None:
    """By any one of its signs; a server of one's own has none of them."""
    assert recognize(version, variables, host).name == name


def test_what_the_server_says_counts_more_than_its_name() -> None:
    """A host's name is chosen by people, and may contain anything."""
    assert recognize("8.0.31-google", PLAIN, "x.rds.amazonaws.com").name.startswith("Google")
    assert recognize("8.0.36", PLAIN, "rds.amazonaws.com.example.com") is SELF_MANAGED


def test_services_have_names_of_their_own() -> None:
    """A name tells which service a text is about, and says what to do with its settings."""
    assert len({service.name for service in SERVICES}) == len(SERVICES)
    assert all(service.settings_in or service.no_log for service in SERVICES)
