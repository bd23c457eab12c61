"""How long a failing sink waits, and what is recorded of its failures."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    SinkRejected,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.pipeline.deliver.deliverer import Retries
from tests.pipeline.deliver.scene import Scene, scene

__all__ = ["scene"]


def test_waits_grow_until_a_success(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is stored with the time of the next attempt, counted and logged."""
    retries, error = Retries(scene.context(), 0), SinkUnavailable("no route")

    delays = [retries.failed(error, scene.checkpoint) for _ in range(3)]

    assert [0.008 <= delay / 2**number <= 0.012 for number, delay in enumerate(delays)] == [
        True
    ] * 3
    stored = scene.checkpoint
    assert (retries.error, stored.failures, stored.last_error) == (error, 3, "no route")
    assert stored.next_attempt_at > 0
    assert [one.fields["attempt"] for one in caplog.records] == [1, 2, 3]  # type: ignore[attr-defined]
    counted = {(one.name, one.labels.get("kind")): one.value for one in scene.store.metrics.read()}
    assert counted["sink_failures_total", error.kind] == 3
    retries.succeeded()
    assert retries.error is None
    assert retries.failed(error, scene.checkpoint) < 0.013


def test_the_wait_survives_a_run(scene: Scene) -> None:
    """Failures before the run count."""
    assert Retries(scene.context(), 8).failed(SinkUnavailable("x"), scene.checkpoint) > 2


def test_a_server_that_says_when(scene: Scene) -> None:
    """Its word counts, shorter or longer than the wait would be, in this run and the next."""
    retries, error = Retries(scene.context(), 8), SinkUnavailable("slow down")

    for seconds in (0.5, 3600.0):
        error.retry_after = seconds
        assert retries.failed(error, scene.checkpoint) == seconds
        left = scene.checkpoint.next_attempt_at - scene.store.now()
        assert seconds - 0.5 < left <= seconds


@pytest.mark.parametrize("error", [SinkRejected("x"), Undeliverable("x", 1, "routing")])
def test_what_does_not_pass_by_itself(scene: Scene, error: DeltaforgeError) -> None:
    """The longest wait at once: nothing changes until a person acts."""
    assert Retries(scene.context(), 0).failed(error, scene.checkpoint) == 40


def test_a_damaged_journal_says_what_to_do(scene: Scene) -> None:
    """Status, log and the run's outcome show the command."""
    retries = Retries(scene.context(), 0)

    retries.failed(JournalDamaged("segment 1: gone"), scene.checkpoint)

    assert str(retries.error).endswith("deltaforge journal rebuild orders")
    assert scene.checkpoint.error_line == str(retries.error)
    assert scene.checkpoint.remedy == ["deltaforge journal rebuild orders"]


def test_a_damaged_journal_that_the_source_has_forgotten(scene: Scene) -> None:
    """What was confirmed before this sink had it cannot be captured again: another command, and the reason."""
    scene.capture(1, 2)
    row = scene.store.segments.read("orders", first=1)[0]
    scene.lease.write(lambda writer: writer.pipeline.set_confirmed(row.end_position))
    retries = Retries(scene.context(), 0)

    retries.failed(JournalDamaged("segment 1: gone"), scene.checkpoint)

    assert "only the journal had it" in str(retries.error)
    assert scene.checkpoint.remedy == ["deltaforge recover orders"]


def test_without_the_lease_nothing_is_stored(scene: Scene) -> None:
    """The failure is known all the same; the deliverer meets the loss itself."""
    retries = Retries(scene.context(), 0)
    scene.lease.lost.set()

    retries.failed(SinkUnavailable("no route"), scene.checkpoint)

    assert (str(retries.error), scene.checkpoint.failures) == ("no route", 0)
