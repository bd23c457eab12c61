"""Tables of which the log lacks a part: `status` says so until every sink has their rows, or somebody acknowledges it."""

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


def test_a_table_that_was_made_again(patient: Patient) -> None:
    """Of a publication made by hand it is gone; after both remedies its copy has no row of the former table."""
    patient.write()
    slot = patient.slot
    patient.shop.execute(f"CREATE PUBLICATION {slot} FOR TABLE customers, orders")
    patient.shop.execute("INSERT INTO customers VALUES (0, 'before the slot')")
    patient.run()
    patient.shop.execute(
        "INSERT INTO customers SELECT n, 'Ada' FROM generate_series(1, 9) n",
        "INSERT INTO orders VALUES (1, 1, 1)",
    )
    patient.run()
    assert patient.problems == []

    patient.shop.execute(
        "DROP TABLE customers",
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
        "INSERT INTO customers VALUES (20, 'Bob')",
    )
    patient.run()
    assert patient.cure("publication") == [
        f'ALTER PUBLICATION "{slot}" ADD TABLE "public"."customers"'
    ]
    patient.shop.execute("INSERT INTO customers VALUES (21, 'Cyd')")
    patient.run()
    (problem,) = patient.problems
    assert problem["subject"] == "table public.customers"
    assert "rows written meanwhile were not captured" in problem["text"]
    assert patient.cure("table public.customers") == [
        "deltaforge snapshot start shop --tables public.customers --sinks redis",
        "deltaforge resync shop --sink copy --tables public.customers",
    ]
    patient.shop.execute("INSERT INTO customers VALUES (22, 'Dee')")
    patient.catch_up()
    patient.catch_up()  # the resync waits for the snapshot
    assert patient.rows(patient.copy, "copied.customers") == patient.rows(
        patient.shop.dsn, "customers"
    )
    assert {20, 21, 22} <= set(patient.told("customers"))
    assert patient.problems == []


@pytest.mark.soak("remedies")
def test_a_table_that_is_published_later(patient: Patient) -> None:
    """The sinks lack what it had before; a snapshot for both gives it to them."""
    patient.shop.execute("DROP TABLE orders")
    patient.write(tables="['public.*']")
    patient.shop.execute(f"CREATE PUBLICATION {patient.slot} FOR TABLE customers, visits")
    patient.run()
    patient.shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada')",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, total numeric(10,2))",
        "INSERT INTO orders VALUES (1, 1, 1)",
    )
    patient.run()
    patient.cure("publication")
    patient.shop.execute("INSERT INTO orders VALUES (2, 1, 1)")
    patient.run()
    assert patient.cure("table public.orders") == [
        "deltaforge snapshot start shop --tables public.orders --sinks copy,redis"
    ]
    assert patient.problem("table public.orders")["remedy"] == []
    patient.catch_up()
    assert (patient.problems, patient.unequal()) == ([], [])
