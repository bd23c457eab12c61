"""Tests of `deltaforge verify` with a real journal and MySQL's log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.database.tables import segments
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.pipeline.capturing import Stage
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

PIPELINE = """\
metadata: {{name: p, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: {db}-db, dsn: "{dsn}", tables: ["{db}.orders", "{db}.items"]}}}}
  sinks:
    - {{type: file, config: {{id: s, path: {folder}/out.jsonl}}}}
"""


@pytest.fixture
def stage(mysql_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """An installation whose pipeline `p` has captured two ranges, with two events and one event."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("DELTAFORGE_HOME", str(home))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "p.yaml"))
    store = StateStore.open(f"sqlite:///{home / 'state.db'}")
    try:
        with MysqlBench(mysql_dsn) as bench:
            text = PIPELINE.format(db=bench.database, dsn=mysql_dsn, folder=tmp_path)
            (tmp_path / "p.yaml").write_text(text)
            made = Stage(bench, store, home / "journal", knows_tables=True)
            for count, statement in ((2, insert("orders", 1, 2)), (3, insert("items", 1))):
                bench.execute(statement)
                made.capture(lambda _, enough=count: len(made.rows()) >= enough)  # type: ignore[misc]
            yield made
    finally:
        store.close()


def verify(*options: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["verify", "p", *options])


def test_a_journal_that_is_what_the_log_says(stage: Stage) -> None:
    """A matching journal has exit code 0, and every selected range and segment is named."""
    (first, second) = stage.store.segments.read("p")

    files = verify()
    whole = verify("--from-source")
    one = verify("--from-source", "--range", str(second.range), "--json")

    assert (files.exit_code, whole.exit_code, one.exit_code) == (0, 0, 0), whole.output
    assert files.stdout.splitlines() == [
        f"range {first.range}: 2 events, files as they were written",
        f"range {second.range}: 1 event, files as they were written",
    ]
    assert whole.stdout == files.stdout + (
        f"segment {first.segment}: 2 rows, the same in the source's log\n"
        f"segment {second.segment}: 1 row, the same in the source's log\n"
    )
    assert json.loads(one.stdout) == {
        "pipeline": "p",
        "ok": True,
        "ranges": {str(second.range): 1},
        "segments": [
            {
                "segment": second.segment,
                "rows": 1,
                "again": 1,
                "ordinals": [],
                "columns": [],
                "equal": True,
            }
        ],
    }


def test_what_differs_from_the_log(stage: Stage) -> None:
    """A difference has exit code 1 and its place; here the first segment covers more of the log than it contains."""
    first, second = stage.store.segments.read("p")
    with stage.store.database.write() as connection:
        connection.execute(
            update(segments)
            .where(segments.c.segment == first.segment)
            .values(end_position=second.end_position)
        )

    text = verify("--from-source")
    parsed = verify("--from-source", "--json")

    assert (text.exit_code, parsed.exit_code) == (1, 1), text.output
    assert f"segment {first.segment} DIFFERS: 2 rows here, 3 in the source's log" in text.stdout
    assert f"segment {second.segment} DIFFERS: 1 row here, 0 in the source's log" in text.stdout
    assert json.loads(parsed.stdout)["ok"] is False
    assert [one["equal"] for one in json.loads(parsed.stdout)["segments"]] == [False, False]


def test_ranges_that_are_not_there(stage: Stage) -> None:
    """Missing ranges are named, with exit code 2 as for other wrong usage."""
    refused = verify("--range", "7")

    assert refused.exit_code == 2
    assert "p has no closed range 7" in refused.stderr
