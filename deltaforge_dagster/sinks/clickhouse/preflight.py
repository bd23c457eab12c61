"""What `deltaforge check` says about a ClickHouse sink."""

# ruff: noqa: S608 - names and texts in queries are quoted

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.clickhouse.client import ClickhouseClient, literal, quoted
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.registry import connect_seconds, not_known
from deltaforge_dagster.sources.findings import Finding, listed

_ROW_GRANTS = ("SELECT", "INSERT")
_DDL_GRANTS = ("CREATE TABLE", "DROP TABLE", "ALTER TABLE")


def findings(config: ClickhouseSinkConfig, names: Sequence[str]) -> list[Finding]:
    """Return what is found by asking the server; nothing is changed there.

    Args:
        config: The sink.
        names: Its tables, as far as the file determines them; what depends on changes is a
            template.

    Raises:
        DeltaforgeError: The server cannot be reached, or refuses the user.
    """
    subject = f"sink {config.id}"
    client = ClickhouseClient(config, connect_seconds(config.send_timeout_secs))
    with contextlib.closing(client):
        (server,) = client.rows(subject, "SELECT version() AS version")
        report = [Finding(subject, "ok", f"{client.where} answers, version {server['version']}")]
        database = literal(config.database)
        databases = client.rows(
            subject, f"SELECT name FROM system.databases WHERE name = {database}"
        )
        if not databases:
            text = f"there is no database {config.database}, or the user may not see it"
            remedy = f"CREATE DATABASE {quoted(config.database)}"
            return [*report, Finding(subject, "error", text, remedy)]
        report.append(_granted(config, client))
        fixed = sorted(name for name in names if not compile_template(name).variables)
        if fixed:
            report.append(_tables(config, client, fixed))
        if templates := set(names) - set(fixed):
            question = "exist, or will be made," if config.auto_create else "exist"
            report.append(not_known(subject, "tables", templates, question))
        return report


def _granted(config: ClickhouseSinkConfig, client: ClickhouseClient) -> Finding:
    """Return whether the user has the privileges that a run needs."""
    subject = f"sink {config.id}"
    needed = [*_ROW_GRANTS, *(_DDL_GRANTS if config.auto_create else ())]
    where = f"{quoted(config.database)}.*"
    lacking = []
    try:
        for privilege in needed:
            (row,) = client.rows(subject, f"CHECK GRANT {privilege} ON {where}")
            if not row["result"]:
                lacking.append(privilege)
    except TableRejected:  # before version 24.11
        text = (
            f"only a run shows whether the user has the privileges {', '.join(needed)} on {where}"
        )
        return Finding(subject, "note", text)
    if lacking:
        text = f"the user lacks {listed(lacking)} on {where}"
        return Finding(subject, "error", text, f"GRANT {', '.join(lacking)} ON {where} TO <user>")
    return Finding(subject, "ok", f"the user has {', '.join(needed)} on {where}")


def _tables(
    config: ClickhouseSinkConfig, client: ClickhouseClient, names: Sequence[str]
) -> Finding:
    """Return which of these tables exist."""
    subject = f"sink {config.id}"
    rows = client.rows(
        subject,
        f"SELECT name FROM system.tables WHERE database = {literal(config.database)}"
        f" AND name IN ({', '.join(map(literal, names))})",
    )
    missing = [name for name in names if name not in {row["name"] for row in rows}]
    if not missing:
        return Finding(subject, "ok", f"there is {listed(list(names))} in {config.database}")
    if config.auto_create:
        return Finding(subject, "ok", f"{listed(missing)} will be made in {config.database}")
    text = f"there is no {listed(missing)} in {config.database}, and auto_create is false"
    return Finding(subject, "error", text, "create it, or set auto_create: true")
