"""A pipeline whose problems are provoked, and that gets exactly the remedies that the product prints.

A test provokes a problem on the real server, waits until `deltaforge status --json` shows it, and calls `cure`, which runs
the commands of the problem's `remedy` as they stand. Then `catch_up` runs the pipeline until nothing is left to do,
and `equal` compares its sinks with the source.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.e2e.command import Command
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment

NAME = "shop"

TABLES = """\
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", table: "copied.${{source.table}}", commit_seconds: 0.1}}}}
"""


@dataclass
class Patient:
    """A pipeline over `customers` and `orders`, with Redis and tables in PostgreSQL as its sinks.

    Attributes:
        shop: The source and Redis.
        deployment: Its folder.
        copy: The database with the sink's tables.
    """

    shop: Shop
    deployment: Deployment
    copy: str

    def begin(self, **pipeline: Any) -> None:
        """Write its file, and run it until its sinks have everything."""
        self.write(**pipeline)
        self.catch_up()

    def write(self, **pipeline: Any) -> None:
        """Write its file."""
        text = self.shop.pipeline(
            NAME,
            more_sinks=TABLES.format(copy=self.copy),
            run="{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}",
            **pipeline,
        )
        self.deployment.add(NAME, text)

    @property
    def slot(self) -> str:
        """The name of its replication slot, and of its publication."""
        text = (self.deployment.pipelines / f"{NAME}.yaml").read_text()
        return text.partition("slot: ")[2].split()[0]

    def deltaforge(self, *arguments: str) -> Command:
        """Execute a command; it may fail."""
        command = self.deployment.command(*arguments)
        command.wait()
        return command

    def run(self) -> Command:
        """Execute a run until it is caught up; it may fail."""
        return self.deltaforge("run", NAME, "--until-caught-up")

    def catch_up(self) -> None:
        """Do what sensors would: run, read snapshots that are due, and run again."""
        for _ in range(2):
            self.run()
            if self.status["snapshot"] is None or self.status["snapshot"]["ended_at"]:
                return
            assert self.deltaforge("snapshot", "run", NAME).process.exitcode == 0
        self.run()

    @property
    def status(self) -> dict[str, Any]:
        """What `status --json` says about the pipeline."""
        shown = json.loads(self.deltaforge("status", "--json").last_line)["pipelines"]
        (found,) = [one for one in shown if one["name"] == NAME]
        assert isinstance(found, dict)
        return found

    @property
    def problems(self) -> list[dict[str, Any]]:
        """The pipeline's problems, errors first."""
        return list(self.status["problems"])

    def problem(self, subject: str) -> dict[str, Any]:
        """Return the only problem of a subject."""
        (found,) = [one for one in self.problems if one["subject"] == subject]
        return found

    def cure(self, subject: str) -> list[str]:
        """Run the remedy of a problem: commands of ours, and statements for the server that it is about."""
        remedy: list[str] = self.problem(subject)["remedy"]
        assert remedy, self.problems
        for command in remedy:
            if command.startswith("deltaforge "):
                done = self.deltaforge(*shlex.split(command)[1:])
                assert done.process.exitcode == 0, done.output
                continue
            dsn = self.copy if subject.startswith("sink ") else self.shop.dsn
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(command.encode())
        return remedy

    def rows(self, dsn: str, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, without the sink's own columns; they are in order of their text."""
        with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
            found = connection.execute(f"SELECT * FROM {table}".encode()).fetchall()
        return self.plain(found)

    @staticmethod
    def plain(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return rows without the sink's own columns, in order of their text."""
        plain = [
            {key: one[key] for key in sorted(one) if not key.startswith("df_")} for one in found
        ]
        return sorted(plain, key=str)

    def source(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table of the source."""
        return self.rows(self.shop.dsn, table)

    def events(self, table: str) -> list[dict[str, Any]]:
        """Return the events that Redis has of a table, in order."""
        return [json.loads(one["df-event"]) for one in self.shop.entries(f"{NAME}.{table}")]

    def told(self, table: str) -> list[Any]:
        """Return the ids that exist according to what Redis was told about a table."""
        ids = {}
        for event in self.events(table):
            row = event["after"] or event["before"]
            ids[row["id"]] = event["op"] != "d"
        return sorted(one for one, exists in ids.items() if exists)

    def unequal(self, *tables: str) -> list[str]:
        """Return in which tables a sink differs from the source: copies in any row, messages in which rows exist."""
        differing = []
        for table in tables or ("customers", "orders"):
            source = self.source(table)
            if self.rows(self.copy, f"copied.{table}") != source:
                differing.append(f"copied.{table}")
            if self.told(table) != sorted(row["id"] for row in source):
                differing.append(f"messages of {table}")
        return differing
