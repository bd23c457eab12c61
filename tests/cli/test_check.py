"""`deltaforge check`, against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
import typer
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.check import check

pytestmark = pytest.mark.postgres

FILE = """\
metadata: {{name: orders, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "{dsn}", slot: check_slot, publication: p, tables: [public.orders]}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost", stream: s}}}}
"""


def run(*arguments: object) -> Result:
    """Run the command alone, as `deltaforge check` runs it."""
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_says_what_is_missing_and_makes_nothing(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 with the statement that mends an error, 0 once it is mended; no state is made."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    file = tmp_path / "orders.yaml"
    file.write_text(FILE.format(dsn=postgres_dsn))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int)")
        before = run(file)
        connection.execute("ALTER TABLE orders ADD PRIMARY KEY (id)")
        after = run(file, "--json")

    assert before.exit_code == 1
    assert 'mend: ALTER TABLE "public"."orders" REPLICA IDENTITY FULL' in before.output
    assert after.exit_code == 0, after.output
    answer = json.loads(after.output.splitlines()[-1])
    assert answer["ok"] is True
    assert {"subject": "slot", "level": "ok", "text": "replication slot 'check_slot' will be created", "mend": None} in answer["findings"]  # fmt: skip
    assert not (tmp_path / "home").exists()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """One finding, no stack."""
    file = tmp_path / "orders.yaml"
    file.write_text(FILE.format(dsn="postgres://u:geheim@127.0.0.1:1/d"))

    result = run(file)

    assert result.exit_code == 1
    assert result.output.startswith("error   connection: PostgreSQL 127.0.0.1:1")
    assert "geheim" not in result.output
