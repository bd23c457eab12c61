"""The first hour with a database of a service: what docs/managed-databases.md says is done word for word, on its profile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from deltaforge_lab.servers import postgres_service
from deltaforge_lab.servers.pgbouncer import PgBouncer
from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.postgres_service import PostgresServiceServer, ServiceProfile
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.fix_postgres import FAST
from tests.remedies.patient import NAME, Patient
from tests.sinks.certificates import certificate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
]

PAGE = Path(__file__).parents[2] / "docs" / "managed-databases.md"

PROFILES = [
    pytest.param(
        profile,
        marks=() if profile is postgres_service.RDS else pytest.mark.soak("managed"),
        id=profile.name,
    )
    for profile in vars(postgres_service).values()
    if isinstance(profile, ServiceProfile)
]


def blocks(title: str) -> dict[str, str]:
    """Return the blocks of code of a section of the page, by their language."""
    (section,) = re.findall(
        rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    found = dict(re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    assert {"sql", "yaml"} <= set(found)
    return found


def prepare(service: PostgresServiceServer, page: dict[str, str]) -> str:
    """Do what the page says, as the service's administrator and in its console; return the DSN of the page's role."""
    service.set_parameters(
        dict(re.findall(r"^([\w.]+) = (\w+)$", page.get("ini", ""), re.MULTILINE))
    )
    dsn = urlsplit(page["yaml"].partition("dsn: ")[2].strip())
    assert "sslmode=verify-" in dsn.query
    role, password = dsn.username or "", unquote(dsn.password or "")
    if "CREATE ROLE" not in page["sql"]:  # it is made in the console
        service.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}' REPLICATION")
    service.execute(*page["sql"].strip().removesuffix(";").split(";\n"), database="shop")
    return service.dsn("shop", role, password)


def check(patient: Patient) -> list[dict[str, Any]]:
    """Return what `deltaforge check` finds at the source, but for what is as it should be."""
    report = json.loads(patient.deltaforge("check", NAME, "--json").last_line)
    return [
        finding
        for finding in report["findings"]
        if finding["level"] != "ok" and not finding["subject"].startswith("sink")
    ]


def refuse_pooler(patient: Patient, dsn: str) -> None:
    """See that `check` recognizes a pooler before the server, as many take its address for the database's."""
    parts = urlsplit(dsn)
    role, password = parts.username or "", unquote(parts.password or "")
    with PgBouncer.start(dsn, {role: password}) as pooler:
        patient.write(dsn=pooler.dsn("shop", role))
        (refused,) = [one for one in check(patient) if one["level"] == "error"]
    assert "a connection pooler answers here" in refused["text"]
    assert f"the server's own port instead of {pooler.port}" in refused["text"]


def change(service: PostgresServiceServer, advice: str) -> None:
    """Change the parameter that an advice names, as the console would."""
    (parameter,) = re.findall(r"([\w.]+) ?= ?(\w+)", advice)
    service.set_parameters(dict([parameter]))


@pytest.mark.usefixtures("redis_client")  # it empties what another profile has left
@pytest.mark.parametrize("profile", PROFILES)
def test_the_first_hour(
    profile: ServiceProfile,
    deploy: Callable[..., Deployment],
    postgres_server: PostgresServer,
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    """Check, run, kill, the limit of retained log, failover, and a failover that leaves the slot behind."""
    # A plain server before 16 lets only superusers hand on attributes, which these services changed.
    version = None if profile.replicators else 17
    files = certificate(tmp_path)
    with PostgresServiceServer.start(profile, *files, FAST, version=version) as service:
        service.create_database("shop")
        shop = Shop(service.dsn("shop"), redis_server.uri)
        shop.execute(
            "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, total numeric(10,2))",
        )
        patient = Patient(shop, deploy(), postgres_server.create_database())
        dsn = prepare(service, blocks(profile.name))
        if profile in (postgres_service.SUPABASE, postgres_service.NEON):
            refuse_pooler(patient, dsn)
        patient.write(dsn=dsn)
        file = patient.deployment.pipelines / f"{NAME}.yaml"
        text = re.sub(r"publication: \w+", "publication: shop", file.read_text())
        file.write_text(text.replace("idle_seconds: 1,", "idle_seconds: 600,"))

        # Nothing is missing, and what could be better is not refused.
        findings = check(patient)
        assert [one for one in findings if one["level"] in ("error", "warning")] == []
        for finding in findings:
            service.execute(*filter(None, (finding["mend"] or "").split("; ")), database="shop")

        patient.catch_up()
        shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
        shop.execute("INSERT INTO orders VALUES (1, 2, 3.50)")
        patient.catch_up()
        assert patient.unequal() == []

        killed = patient.deployment.command("run", NAME)
        shop.execute(
            "INSERT INTO customers VALUES (3, 'Cyd')", "DELETE FROM customers WHERE id = 1"
        )
        eventually(lambda: patient.told("customers") == [2, 3])
        killed.kill()
        shop.execute("INSERT INTO orders VALUES (2, 2, 4.50)")

        service.set_parameters({"max_slot_wal_keep_size": "64"})
        (short,) = [one for one in check(patient) if one["subject"] == "retention"]
        assert (short["level"], short["mend"]) == ("warning", None)
        change(service, short["text"].rpartition("; ")[2])
        assert [one for one in check(patient) if one["subject"] == "retention"] == []

        eventually(lambda: patient.run().process.exitcode == 0)  # the killed run's lease ends first
        assert patient.unequal() == []

        running = patient.deployment.command("run", NAME)
        shop.execute("INSERT INTO customers VALUES (4, 'Dee')")
        eventually(lambda: patient.told("customers") == [2, 3, 4])
        service.fail_over(keeps_slots=True)
        shop.execute("INSERT INTO customers VALUES (5, 'Eve')")
        eventually(lambda: patient.told("customers") == [2, 3, 4, 5])
        running.process.terminate()
        running.wait()
        patient.catch_up()
        assert patient.unequal() == []

        service.fail_over(keeps_slots=False)
        shop.execute("UPDATE customers SET name = 'Bee' WHERE id = 2", "TRUNCATE orders")
        patient.run()
        assert patient.status["status"] == "failed"
        assert patient.cure("source") == ["deltaforge recover shop"]
        patient.catch_up()
        assert patient.unequal("customers") == []
        assert patient.rows(patient.copy, "copied.orders") == []
        assert patient.problems == []
