"""Tables of MySQL that are dropped and made again: the log has every change, but not the end of the rows before."""

from __future__ import annotations

import pytest

from tests.remedies.patient import NAME, TABLES, Patient
from tests.sources.mysql.bench import MysqlBench

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.soak("remedies"),
]

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: {database}, dsn: "{dsn}", tables: [{database}.orders]}}}}
  sinks:
{sinks}  engine: {{run: {{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}}}}
"""


def test_a_table_that_was_made_again(patient: Patient, mysql_dsn: str) -> None:
    """Its copy keeps rows of the former table, and `status` says so until they are gone."""
    with MysqlBench(mysql_dsn) as bench:
        text = PIPELINE.format(
            name=NAME,
            dsn=bench.dsn,
            database=bench.database,
            sinks=TABLES.format(copy=patient.copy),
        )
        patient.deployment.add(NAME, text)
        patient.run()
        bench.run("INSERT INTO orders VALUES (1, 'former'), (2, 'former')")
        patient.run()
        assert [one["id"] for one in patient.rows(patient.copy, "copied.orders")] == [1, 2]
        bench.run("CREATE TABLE IF NOT EXISTS orders (id INT PRIMARY KEY, v TEXT)")
        patient.run()
        assert patient.problems == []

        bench.run("DROP TABLE orders")
        patient.run()  # what is known of it lasts until the next run
        bench.run(
            "CREATE TABLE orders (id INT PRIMARY KEY, v TEXT)", "INSERT INTO orders VALUES (2, 'b')"
        )
        patient.run()
        table = f"table {bench.database}.orders"
        assert patient.cure(table) == [
            f"deltaforge resync {NAME} --sink copy --tables {bench.database}.orders"
        ]
        bench.run("INSERT INTO orders VALUES (3, 'c')")
        patient.catch_up()
        patient.catch_up()
        assert [one["id"] for one in patient.rows(patient.copy, "copied.orders")] == [2, 3]
        assert patient.problems == []
