"""Which checkpoints the source has to wait for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.pipeline.committed import (
    committed_position,
    detachable_sinks,
    segments_behind,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import CheckpointRow, HoldRow, HoldState, PipelineRow

SPEC = """\
metadata: {{name: p, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: src, dsn: "postgres://u@localhost/db", slot: s, publication: p, tables: [public.t]}}
  sinks:
    - {{type: file, config: {{id: a, path: /tmp/a, required: {a}}}}}
    - {{type: file, config: {{id: b, path: /tmp/b, required: {b}}}}}
    - {{type: file, config: {{id: c, path: /tmp/c, required: {c}}}}}
  commit_policy: {policy}
  engine: {{journal: {{confirm: {confirm}}}}}
"""


def spec(folder: Path, required: str, policy: str, confirm: str = "delivered") -> PipelineSpec:
    """Return a pipeline of sinks a, b, c; `required` lists those that are."""
    flags = {sink: str(sink in required).lower() for sink in "abc"}
    path = folder / "p.yaml"
    path.write_text(SPEC.format(**flags, policy=policy, confirm=confirm))
    return load_pipeline(path).spec


def row(next_segment: int = 4) -> PipelineRow:
    """Return a pipeline whose journal ends at position 30."""
    captured = LsnPosition(30).to_json()
    return PipelineRow("p", "u", "h", None, captured, None, next_segment, 1, "running", 0, 0)


def at(segment: int, *, complete: bool = True) -> CheckpointRow:
    """Return a checkpoint whose last complete segment ends at ten times its number."""
    whole = segment if complete else segment - 1
    position = LsnPosition(10 * whole).to_json() if whole else None
    return CheckpointRow("s", segment, 0, complete, position, 0, 0, None, 0, 1)


@pytest.mark.parametrize(
    ("required", "policy", "expected"),
    [
        ("abc", "{mode: required}", 10),
        ("bc", "{mode: required}", 20),
        ("c", "{mode: required}", 30),
        ("", "{mode: required}", 30),
        ("c", "{mode: all}", 10),
        ("a", "{mode: quorum, quorum: 1}", 30),
        ("a", "{mode: quorum, quorum: 2}", 20),
        ("a", "{mode: quorum, quorum: 3}", 10),
    ],
)
def test_the_policy_chooses_the_checkpoint(
    tmp_path: Path, required: str, policy: str, expected: int
) -> None:
    """With sinks at 10, 20 and 30: required waits for its slowest, all for all, quorum for N."""
    checkpoints = {"a": at(1), "b": at(2), "c": at(3)}

    found = committed_position(spec(tmp_path, required, policy), row(), checkpoints)

    assert found == LsnPosition(expected)


def test_a_required_sink_that_has_nothing_commits_nothing(tmp_path: Path) -> None:
    """Until a required sink has a whole segment the source forgets nothing."""
    checkpoints = {"a": at(1, complete=False), "b": at(2), "c": at(3)}

    assert committed_position(spec(tmp_path, "a", "{mode: required}"), row(), checkpoints) is None


def test_confirm_captured_frees_the_source_at_the_journals_end(tmp_path: Path) -> None:
    """`confirm: captured` lets the source forget what the journal holds."""
    wanted = spec(tmp_path, "abc", "{mode: required}", confirm="captured")

    assert committed_position(wanted, row(), {"a": at(1)}) == LsnPosition(30)


def test_segments_behind_counts_the_segment_in_flight() -> None:
    """A segment delivered in part is still lacking."""
    assert [
        segments_behind(row(), at(n, complete=c)) for n, c in [(3, True), (3, False), (1, True)]
    ] == [0, 1, 2]


def test_a_detached_sink_counts_nowhere(tmp_path: Path) -> None:
    """The source does not wait for it, it lacks nothing, and without others all may be forgotten."""
    wanted = spec(tmp_path, "ab", "{mode: required}")
    gone = replace(at(1), state="detached")

    assert committed_position(wanted, row(), {"a": gone, "b": at(2), "c": at(3)}) == LsnPosition(20)
    assert committed_position(wanted, row(), {"a": gone, "b": gone, "c": at(1)}) == LsnPosition(30)
    assert segments_behind(row(), gone) == 0


@pytest.mark.parametrize(
    ("required", "policy", "expected"),
    [
        ("a", "{mode: required}", ["c"]),
        ("", "{mode: required}", ["a", "c"]),
        ("a", "{mode: all}", []),
        ("abc", "{mode: quorum, quorum: 1}", ["a"]),
        ("abc", "{mode: quorum, quorum: 2}", []),
    ],
)
def test_what_the_policy_can_do_without(
    tmp_path: Path, required: str, policy: str, expected: list[str]
) -> None:
    """Attached sinks that nothing waits for, the slowest first; `b` is detached already."""
    rows = {"a": at(1), "b": replace(at(1), state="detached"), "c": at(3)}
    checkpoints = {sink: replace(one, sink=sink) for sink, one in rows.items()}

    assert detachable_sinks(spec(tmp_path, required, policy), checkpoints) == expected


def hold(state: HoldState, last_segment: int | None = None) -> HoldRow:
    """Return a hold whose first event stands behind position 5."""
    since = LsnPosition(5).to_json()
    return HoldRow("table", "t", state, "", 0, since, 1, 1, None, last_segment)


def test_a_hold_keeps_its_first_event(tmp_path: Path) -> None:
    """Until the sinks that count have its events, whatever the journal or other sinks have."""
    wanted = spec(tmp_path, "ab", "{mode: required}")
    checkpoints = {"a": at(1), "b": at(3), "c": at(1)}

    def committed(*holds: HoldRow) -> Position | None:
        return committed_position(wanted, row(), checkpoints, holds)

    assert committed() == LsnPosition(10)
    assert committed(hold("held")) == LsnPosition(5)
    assert committed(hold("released")) == LsnPosition(5)
    assert committed(hold("journaled", 2)) == LsnPosition(5)
    assert committed(hold("journaled", 1)) == LsnPosition(10)

    captured = spec(tmp_path, "ab", "{mode: required}", "captured")
    expected_positions: dict[HoldState, int] = {"held": 5, "released": 5, "journaled": 30}
    for state, expected in expected_positions.items():
        found = committed_position(captured, row(), checkpoints, [hold(state, 3)])
        assert found == LsnPosition(expected)
