"""A copy of a pipeline's file under another name: it is refused everywhere, and the pipeline that was there goes on."""

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


def test_a_copied_file_takes_nothing(patient: Patient) -> None:
    """No command of the copy touches the slot or the tables; with a slot and tables of its own it works."""
    patient.begin()
    patient.shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada')", "INSERT INTO orders VALUES (1, 1, 1)"
    )
    file = patient.deployment.pipelines / f"{NAME}.yaml"
    copy = patient.deployment.add(
        "copy", file.read_text().replace(f"name: {NAME}", "name: copy", 1)
    )
    for arguments in (
        ["validate"],
        ["check", "copy"],
        ["check", NAME],
        ["run", "copy", "--until-caught-up"],
        ["checkpoint", "reset", "copy", "--all", "--yes"],
        ["snapshot", "start", "copy"],
        ["resync", "copy", "--sink", "copy"],
    ):
        command = patient.deltaforge(*arguments)
        assert command.process.exitcode, command.output
        text = command.output.replace("\n", " ")
        assert f"replication slot {patient.slot!r}" in text
        assert str(file) in text
        assert str(copy) in text

    patient.catch_up()
    assert (patient.unequal(), patient.problems) == ([], [])

    text = copy.read_text().replace(f"slot: {patient.slot}", "slot: a_slot_of_its_own")
    copy.write_text(text.replace("copied.$", "another.$"))
    assert patient.deltaforge("validate").process.exitcode == 0
    run = patient.deltaforge("run", "copy", "--until-caught-up")
    assert run.process.exitcode == 0, run.output
    patient.shop.execute("INSERT INTO customers VALUES (2, 'Bo')")
    patient.deltaforge("run", "copy", "--until-caught-up")
    patient.catch_up()
    assert (patient.unequal(), patient.problems) == ([], [])
    rows = patient.rows(patient.copy, "another.customers")
    assert rows == [{"id": 2, "name": "Bo"}]
