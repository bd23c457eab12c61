"""`deltaforge recover`, after the source's log has lost the pipeline's position."""

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


def test_a_slot_that_is_gone(patient: Patient) -> None:
    """Tables equal the source, and Redis has every row; changes that a sink lacks from before are delivered first."""
    patient.begin()
    patient.shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob'), (3, 'Cyd')",
        "INSERT INTO orders VALUES (1, 1, 1)",
    )
    patient.run()
    assert patient.unequal() == []
    refused = patient.deltaforge("recover", "shop")
    assert refused.process.exitcode != 0
    assert "has lost nothing" in refused.output

    with psycopg.connect(patient.shop.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (patient.slot,))
    patient.shop.execute(
        "DELETE FROM customers WHERE id = 2",
        "UPDATE customers SET name = 'Cid' WHERE id = 3",
        "INSERT INTO customers VALUES (4, 'Dee')",
        "TRUNCATE orders",
    )
    patient.run()
    assert patient.status["status"] == "failed"
    assert patient.cure("source") == ["deltaforge recover shop"]
    output = patient.deployment.commands[-1].output
    assert "empty 2 tables of copy and load them again: copied.customers, copied.orders" in output
    assert "send redis every row that exists now; rows that were deleted after" in output

    patient.shop.execute("INSERT INTO customers VALUES (5, 'Eve')")
    patient.catch_up()
    patient.shop.execute("DELETE FROM customers WHERE id = 1")
    patient.run()
    assert patient.problems == []
    assert patient.unequal("customers") == ["messages of customers"]
    assert patient.told("customers") == [2, 3, 4, 5]  # that 2 was deleted cannot be known
    assert patient.rows(patient.copy, "copied.orders") == []
