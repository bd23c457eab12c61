"""What a sink holds after kills, checked from the sink alone; how far repeats may go, from the store.

A *life* is what one run did, until it was killed or ended. The sink is one or more partitions
(one for a Redis stream), each a list of what arrived, in its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.kills.workload import Change


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message in a sink."""

    change: Change
    event_id: str


@dataclass(slots=True)
class Life:
    """One run: how it ended, and how things stood when it began.

    Attributes:
        acknowledged: How many changes of the journal the sink's checkpoint covered.
        lengths: How many messages each partition had.
        ended: How it ended, and after how many seconds, for people.
    """

    acknowledged: int
    lengths: tuple[int, ...]
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What arrived: `messages` in all, of which `repeats` are repeats."""

    messages: int
    repeats: int


def check_delivery(
    partitions: Sequence[Sequence[Arrived]], expected: Mapping[int, Sequence[Change]]
) -> Verdict:
    """Prove that nothing is lost or invented, and that first arrivals keep each key's order."""
    order: dict[int, list[Change]] = defaultdict(list)
    place: dict[int, int] = {}
    ids: dict[str, Change] = {}
    for number, partition in enumerate(partitions):
        for one in partition:
            assert place.setdefault(one.change.key, number) == number, "a key changed its partition"
            if ids.setdefault(one.event_id, one.change) != one.change:
                raise AssertionError(f"event id {one.event_id} stands for two changes")
        for change in dict.fromkeys(one.change for one in partition):
            order[change.key].append(change)
    for key in sorted(expected.keys() | order.keys()):
        assert order.get(key, []) == list(expected.get(key, [])), (
            f"key {key}: {_difference(order.get(key, []), expected.get(key, []))}"
        )
    messages = sum(len(partition) for partition in partitions)
    changes = sum(len(one) for one in expected.values())
    assert len(ids) == changes, "one change, one event id"
    return Verdict(messages, messages - changes)


def check_repeats(
    partitions: Sequence[Sequence[Arrived]], journal: Sequence[str], lives: Sequence[Life]
) -> None:
    """Prove that each life sent what followed its checkpoint: in log order, once, without gaps.

    So what is repeated is exactly what the sink had got since the checkpoint was written last.

    Args:
        partitions: What arrived.
        journal: The event ids of every captured change, in log order.
        lives: In order; the first began with an empty sink.
    """
    index = {event_id: number for number, event_id in enumerate(journal)}
    for number, partition in enumerate(partitions):
        log = sorted({index[one.event_id] for one in partition})
        for life, after in zip(lives, [*lives[1:], None], strict=True):
            stop = None if after is None else after.lengths[number]
            sent = [index[one.event_id] for one in partition[life.lengths[number] : stop]]
            if not sent:
                continue
            due = [one for one in log if life.acknowledged <= one <= sent[-1]]
            assert sent == due, (
                f"partition {number}, the life that ended by {life.ended}: began with change "
                f"{sent[0]} of the journal, {life.acknowledged} were acknowledged; "
                f"sent {len(sent)}, due {len(due)}"
            )


def _difference(found: Sequence[Change], wanted: Sequence[Change]) -> str:
    for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return f"at {place} there is {one}, not {other}"
    return f"{len(found)} changes arrived, not {len(wanted)}: {[*found, *wanted][min(len(found), len(wanted)) :][:3]}"
