"""Tables of the source whose key is dropped, and added again."""

from __future__ import annotations

import pytest

from tests.remedies.patient import Patient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
]


def test_a_key_that_is_dropped_and_added_again(patient: Patient) -> None:
    """Rows without a key hold the table; once the source's table has its key again, the copy is loaded once and equal."""
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    patient.shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    patient.run()
    patient.shop.execute(
        "ALTER TABLE customers DROP CONSTRAINT customers_pkey",
        "ALTER TABLE customers REPLICA IDENTITY FULL",
        "INSERT INTO customers VALUES (2, 'Bob')",
    )
    patient.run()
    assert "give it a key" in patient.problem("sink copy")["text"]
    patient.shop.execute("ALTER TABLE customers ADD PRIMARY KEY (id), REPLICA IDENTITY DEFAULT")

    remedy = patient.cure("sink copy")
    assert remedy == ["deltaforge resync shop --sink copy --tables public.customers"]
    patient.catch_up()
    patient.shop.execute("UPDATE customers SET name = 'Bo' WHERE id = 2")
    patient.shop.execute("INSERT INTO customers VALUES (3, 'Cyd')")
    patient.run()
    assert (patient.problems, patient.unequal()) == ([], [])
