"""A journal that is lost after `confirm: auto` let the source forget what only it had."""

from __future__ import annotations

import shutil

import pytest

from tests.remedies.patient import NAME, Patient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(900),
]


@pytest.mark.soak("remedies")
def test_what_only_the_journal_had(patient: Patient) -> None:
    """`status` names the command, as `journal rebuild` does, which refuses; after it, sinks equal the source."""
    patient.write()
    file = patient.deployment.pipelines / f"{NAME}.yaml"
    text = file.read_text().replace("idle_seconds: 1,", "idle_seconds: 5,")
    file.write_text(f"{text}    journal: {{durable_disk: true, confirm_above: 1}}\n")
    patient.shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    patient.run()
    patient.shop.execute("INSERT INTO customers VALUES (3, 'Cyd')")
    patient.run()
    for sink in ("redis", "copy"):
        patient.deltaforge("sink", "pause", NAME, sink)
    at_the_end = patient.status["confirmed_early"]
    assert at_the_end is None, "sinks had everything when the run ended"
    added = 3
    while patient.status["confirmed_early"] is None:  # a run may end before it looks at the log
        added += 1
        assert added < 20, patient.status
        patient.shop.execute(f"INSERT INTO customers VALUES ({added}, 'Dee')")
        patient.deltaforge("run", NAME)
    status = patient.status
    assert "confirm_above" in status["confirmed_early"]["why"]
    assert status["committed_position"] == status["captured_position"]
    assert "confirmed up to what the journal has" in patient.problem("confirm")["text"]

    shutil.rmtree(patient.deployment.folder / "home" / "journal" / NAME)
    for sink in ("redis", "copy"):
        patient.deltaforge("sink", "resume", NAME, sink)
    command = f"deltaforge recover {NAME}"
    ran = patient.run()
    errors = [problem for problem in patient.problems if problem["severity"] == "error"]
    assert len(errors) == 1, (ran.output, patient.status)
    (failing,) = errors
    assert failing["remedy"] == [command]
    assert "only the journal had it" in failing["text"]
    refused = patient.deltaforge("journal", "rebuild", NAME)
    assert refused.process.exitcode != 0
    assert "sinks copy, redis lack changes that the source was told it may forget" in refused.output
    assert command in refused.output

    patient.cure(failing["subject"])
    said = patient.deployment.commands[-1].output
    assert "the journal has lost files that copy, redis need" in said
    patient.catch_up()
    patient.shop.execute("DELETE FROM customers WHERE id = 2")
    patient.run()
    assert patient.problems == []
    assert patient.unequal("customers") == []
    assert patient.status["confirmed_early"] is None
