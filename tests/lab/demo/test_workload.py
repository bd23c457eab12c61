"""Tests that the demo's workload writes what its record says."""

from __future__ import annotations

import itertools
import threading
import time

import psycopg
import pytest

from deltaforge_lab.demo.databases import PostgresDatabase
from deltaforge_lab.demo.workload import TABLES, Workload


def test_rows_are_functions_of_key_and_version() -> None:
    """An event's key and version determine its whole row."""
    for table in TABLES:
        assert table.row(5, 2) == table.row(5, 2)
        assert table.row(5, 2) != table.row(5, 3)
        assert list(table.row(5, 2))[:2] == ["id", "version"]


@pytest.mark.postgres
def test_the_record_agrees_with_the_database(postgres_dsn: str) -> None:
    """The last recorded steps of all keys match the tables' contents, value by value."""
    workload = Workload(PostgresDatabase(postgres_dsn))
    workload.create_tables()
    workload.write(700, 50)
    workload.write(300, 1)

    record = workload.record
    assert record.total == 1000
    assert sum(map(len, record.steps.values())) == 1000
    with psycopg.connect(postgres_dsn) as connection:
        for table in TABLES:
            held = {
                (table.name, row["id"]): row["version"]
                for (row,) in connection.execute(f"SELECT to_jsonb(t) FROM {table.name} t")
                if table.row(row["id"], row["version"]) == {**row, **_as_text(row)}
            }
            last = {
                key: steps[-1][1]
                for key, steps in record.steps.items()
                if key[0] == table.name and steps[-1][0] != "d"
            }
            assert held == last


def _as_text(row: dict[str, object]) -> dict[str, object]:
    """Convert numerics to text, as events have them; `to_jsonb` writes numbers."""
    return {"amount": f"{row['amount']:.2f}"} if "amount" in row else {}


@pytest.mark.postgres
def test_each_key_has_a_history_that_can_happen(postgres_dsn: str) -> None:
    """Each key has an insert, consecutive versions, and a final delete; only keys of orders come back."""
    workload = Workload(PostgresDatabase(postgres_dsn))
    workload.create_tables()
    workload.write(5000, 100)

    returned = set()
    for (table, _), steps in workload.record.steps.items():
        assert steps[0] == ("c", 1)
        for (op, version), (next_op, next_version) in itertools.pairwise(steps):
            assert (op == "d") == (next_op == "c")
            assert next_version == version + (next_op != "d")
            if op == "d":
                returned.add(table)
    assert returned == {"orders"}


@pytest.mark.postgres
def test_several_changes_of_a_key_share_a_transaction(postgres_dsn: str) -> None:
    """Some transactions change a key more than once, so the demo covers order within a transaction."""
    workload = Workload(PostgresDatabase(postgres_dsn))
    workload.create_tables()
    workload.write(100, 100)

    assert max(map(len, workload.record.steps.values())) > 1


@pytest.mark.postgres
def test_writing_takes_the_time_it_is_given_and_can_be_stopped(postgres_dsn: str) -> None:
    """The calm phase is paced, and stopping does not wait for its end."""
    workload = Workload(PostgresDatabase(postgres_dsn))
    workload.create_tables()
    stop = threading.Event()

    def interrupt() -> None:
        while not workload.record.total:
            time.sleep(0.01)
        stop.set()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    workload.write(1000, 1, seconds=1000, stop=stop)
    thread.join()

    assert 0 < workload.record.total < 100
