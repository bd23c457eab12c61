"""Destinations that somebody changed: what `status` says to run lets the sink go on, with all rows."""

from __future__ import annotations

import psycopg
import pytest

from tests.remedies.patient import Patient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
]


@pytest.mark.soak("remedies")
def test_a_column_that_must_not_be_null(patient: Patient) -> None:
    """The table is held; once the statement was executed, it has the row."""
    patient.begin()
    patient.shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada')", "INSERT INTO orders VALUES (1, 1, 1)"
    )
    patient.run()
    assert patient.unequal() == []
    with psycopg.connect(patient.copy) as connection:
        connection.execute("ALTER TABLE copied.customers ALTER COLUMN name SET NOT NULL")
    patient.shop.execute("INSERT INTO customers VALUES (2, NULL)")
    patient.run()
    assert patient.problem("sink copy")["severity"] == "error"

    remedy = patient.cure("sink copy")
    assert remedy == ['ALTER TABLE "copied"."customers" ALTER COLUMN "name" DROP NOT NULL']
    patient.shop.execute("INSERT INTO customers VALUES (3, NULL)")
    patient.catch_up()
    assert (patient.unequal(), patient.problems) == ([], [])


@pytest.mark.soak("remedies")
def test_a_column_that_was_dropped(patient: Patient) -> None:
    """The column does not come back with nulls: the table is held until it was loaded again."""
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    patient.run()
    with psycopg.connect(patient.copy) as connection:
        connection.execute("ALTER TABLE copied.customers DROP COLUMN name")
    patient.shop.execute("INSERT INTO customers VALUES (2, 'Bo')")
    patient.run()

    remedy = patient.cure("sink copy")
    assert remedy == ["deltaforge resync shop --sink copy --tables public.customers"]
    patient.shop.execute("INSERT INTO customers VALUES (3, 'Cy')")
    patient.catch_up()
    assert (patient.unequal("customers"), patient.problems) == ([], [])
