"""Tables and columns that get other names or types, and names in the file that match nothing."""

from __future__ import annotations

import pytest

from tests.remedies.patient import NAME, Patient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.soak("remedies"),
]


def rewrite(patient: Patient, old: str, new: str) -> None:
    """Change the pipeline's file as a person would."""
    path = patient.deployment.pipelines / f"{NAME}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("change", "renamed"),
    [
        ("ALTER TABLE customers RENAME TO clients", "public.clients"),
        ("ALTER TABLE customers SET SCHEMA moved", "moved.customers"),
    ],
    ids=["renamed", "moved"],
)
def test_a_table_with_another_name(patient: Patient, change: str, renamed: str) -> None:
    """The name in the file is asked for; with it, the rows from before are missing until a snapshot was read."""
    patient.shop.execute("CREATE SCHEMA moved")
    patient.begin(tables="[public.customers]")
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bo')")
    patient.run()
    patient.shop.execute(change, f"INSERT INTO {renamed} VALUES (3, 'Cy')")
    patient.run()
    (problem,) = patient.problems
    assert "no such table is there: public.customers; if it has another name" in problem["text"]

    rewrite(patient, "public.customers", renamed)
    patient.run()
    patient.cure(f"table {renamed}")
    patient.catch_up()
    table = renamed.partition(".")[2]
    copy = f"copied.{table}"
    if table == "customers":
        assert "change the sink's `table`" in patient.problem("sink copy")["text"]
        rewrite(patient, "copied.${source.table}", "copied.${source.schema}_${source.table}")
        copy = "copied.moved_customers"
        patient.run()
        assert patient.cure("sink copy") == [
            "deltaforge resync shop --sink copy --tables moved.customers"
        ]
        patient.catch_up()
    patient.shop.execute(f"INSERT INTO {renamed} VALUES (4, 'Di')")
    patient.shop.execute(f"DELETE FROM {renamed} WHERE id = 1")
    patient.catch_up()
    assert patient.problems == []
    assert patient.rows(patient.copy, copy) == patient.source(renamed)
    assert patient.told(table) == [2, 3, 4]


def test_rows_that_go_to_another_table_now(patient: Patient) -> None:
    """After a change of the sink's `table`, the new table lacks the rows of the former one until it was loaded again."""
    patient.begin(tables="[public.customers]")
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    patient.run()
    rewrite(patient, "copied.${source.table}", "copied.${source.table}_now")
    patient.shop.execute("INSERT INTO customers VALUES (2, 'Bo')")
    patient.run()
    assert patient.cure("sink copy") == [
        "deltaforge resync shop --sink copy --tables public.customers"
    ]
    patient.shop.execute("INSERT INTO customers VALUES (3, 'Cy')")
    patient.catch_up()
    patient.catch_up()
    assert patient.problems == []
    assert patient.rows(patient.copy, "copied.customers_now") == patient.source("customers")


def test_a_column_with_another_name(patient: Patient) -> None:
    """It is renamed in the copy, with its values."""
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    patient.run()
    patient.shop.execute(
        "ALTER TABLE customers RENAME name TO label", "INSERT INTO customers VALUES (2, 'Bo')"
    )
    patient.catch_up()
    assert (patient.unequal("customers"), patient.problems) == ([], [])


@pytest.mark.parametrize("together", [False, True], ids=["later", "together"])
def test_a_type_that_converts_rows(patient: Patient, together: bool) -> None:
    """What the source made of older values is not in its log: `status` says so until the table was loaded again."""
    patient.begin()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    if not together:
        patient.run()
    patient.shop.execute(
        "ALTER TABLE customers ALTER name TYPE integer USING length(name)",
        "INSERT INTO customers VALUES (2, 2)",
    )
    patient.catch_up()
    remedy = patient.cure("sink copy")
    assert remedy == ["deltaforge resync shop --sink copy --tables public.customers"]
    patient.shop.execute("INSERT INTO customers VALUES (3, 3)")
    patient.catch_up()
    patient.catch_up()
    assert (patient.unequal("customers"), patient.problems) == ([], [])


def test_patterns_that_match_nothing(patient: Patient) -> None:
    """The run says so; with a pattern that matches, it begins."""
    patient.begin(tables="['public.customer_*']")
    (problem,) = patient.problems
    assert "no table matches source.config.tables (public.customer_*)" in problem["text"]

    rewrite(patient, "public.customer_*", "public.customer*")
    patient.run()
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    patient.catch_up()
    assert (patient.unequal("customers"), patient.problems) == ([], [])
