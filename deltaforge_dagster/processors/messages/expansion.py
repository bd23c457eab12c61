"""Several messages for one change: tombstones, and key updates as delete and insert.

Kafka's log compaction keeps the last record of each key forever, unless that record is a
*tombstone*, a record without a value ("Kafka documentation", "Log Compaction"). And an update that
changes a row's key is a record of the new key only, so a consumer that keeps a state per key would
keep the state of the old key. Therefore a change frame can be *expanded* by rows that follow the
change that they belong to, with the same ordinal, in this order::

    delete                        an update that changes its key
    CHANGE      the delete        SPLIT            the update
    TOMBSTONE                     DELETE_HALF      before image, old key
                                  HALF_TOMBSTONE   old key
                                  INSERT_HALF      after image, new key

A sink's `RowSelection` says which of these rows the sink gets: one that splits updates gets the
halves instead of the update. A half is an ordinary delete or insert in every envelope.

The old key has the columns of `key`, which is the new key, with their values in the before image.
If the before image lacks one of them, the update is not split. Values are compared as JSON text.

Every message has a unique id: the first message of a change has the change's id, the ids of the
others are a function of that id and their role (`copy_id`).
"""

# ruff: noqa: C901, PLR0917 - kernels are flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.json_fields import blank, string_end, value_end
from deltaforge_dagster.kernels.message_text import MAX_BYTES, Mask, layout
from deltaforge_dagster.kernels.runtime import (
    CLOSE_BRACE,
    COLON,
    COMMA,
    OPEN_BRACE,
    QUOTE,
    Bytes,
    Longs,
    copy,
    kernel,
)

CHANGE, SPLIT, DELETE_HALF, HALF_TOMBSTONE, INSERT_HALF, TOMBSTONE = range(6)
"""The roles of rows in an expanded frame (column `role`)."""

_COPY = {TOMBSTONE: 2, HALF_TOMBSTONE: 2, INSERT_HALF: 3}
"""The number of a row's message within its change, for roles that are not the first message."""

_Roles: TypeAlias = npt.NDArray[np.uint8]
_SAME, _NO_COLUMN = -1, -2


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which rows of an expanded frame a sink gets.

    Attributes:
        splits: Whether an update that changes the key is delivered as delete and insert.
        tombstones: Whether a tombstone follows each delete.
        skipped: Ops to leave out (`c`, `u`, `d`, `r`, `t`); the halves of an update count as delete
            and insert, a tombstone counts as a delete.
        captured: Whether to include events that were captured from the source.
        synthetic: Whether to include events that processors created.
        producers: If not empty, only events that these processors created.
    """

    splits: bool = False
    tombstones: bool = False
    skipped: tuple[str, ...] = ()
    captured: bool = True
    synthetic: bool = True
    producers: tuple[str, ...] = ()

    def roles(self) -> npt.NDArray[np.bool_]:
        """Return a mask over the roles whose rows the sink gets."""
        wanted = {CHANGE, *((DELETE_HALF, INSERT_HALF) if self.splits else (SPLIT,))}
        if self.tombstones:
            wanted |= {TOMBSTONE, HALF_TOMBSTONE} if self.splits else {TOMBSTONE}
        return np.isin(np.arange(6), list(wanted))


def selected(selection: RowSelection, frame: pa.RecordBatch) -> pa.BooleanArray:
    """Return a mask of the rows that a sink gets, for a frame that may be expanded."""
    chosen = np.ones(frame.num_rows, np.bool_)
    if "role" in frame.schema.names:
        chosen &= selection.roles()[frame.column("role").to_numpy()]
    if selection.skipped:
        chosen &= ~_named(frame.column("op"), selection.skipped)
    producers = frame.column("synthetic")
    synthetic = producers.is_valid().to_numpy(zero_copy_only=False)
    if not selection.captured:
        chosen &= synthetic
    if not selection.synthetic:
        chosen &= ~synthetic
    if selection.producers:
        chosen &= _named(producers, selection.producers)
    return pa.array(chosen)


def _named(column: pa.Array[Any], names: Sequence[str]) -> Mask:
    """Return a mask of the rows of a dictionary column that hold one of `names`."""
    assert isinstance(column, pa.DictionaryArray)
    wanted = [number for number, name in enumerate(column.dictionary.to_pylist()) if name in names]
    return np.isin(column.indices.fill_null(-1).to_numpy(zero_copy_only=False), wanted)


def expand(frame: pa.RecordBatch, *, splits: bool, tombstones: bool) -> pa.RecordBatch:
    """Return a frame with every row that some sink may get, and the column `role`.

    Every row except tombstones has its own `event_id`. A tombstone has that of its delete, so that
    everything derived from it, above all the message key, is the same for both (see `identified`).

    Raises:
        UnsupportedEvent: The rows need more than 2 GiB.
    """
    ops = frame.column("op")
    split, old_keys = changed_keys(frame) if splits else (np.zeros(0, np.int64), None)
    deletes = np.flatnonzero(_named(ops, "d")) if tombstones else np.zeros(0, np.int64)
    if not len(split) and not len(deletes):
        return unexpanded(frame)
    counts = np.ones(frame.num_rows, np.int64)
    counts[split] += 3 if tombstones else 2
    counts[deletes] += 1
    if int(counts.max()) * frame.nbytes > MAX_BYTES:
        raise UnsupportedEvent("the messages of one change need more than 2 GiB")
    starts = np.cumsum(counts) - counts
    roles = np.full(int(counts.sum()), CHANGE, np.uint8)
    roles[starts[deletes] + 1] = TOMBSTONE
    halves = (SPLIT, DELETE_HALF, *((HALF_TOMBSTONE,) if tombstones else ()), INSERT_HALF)
    for offset, role in enumerate(halves):
        roles[starts[split] + offset] = role
    rows = frame.take(np.repeat(np.arange(frame.num_rows), counts))
    if old_keys is not None and len(split):
        rows = _divided(rows, roles, old_keys)
    return rows.append_column("role", pa.array(roles))


def unexpanded(frame: pa.RecordBatch) -> pa.RecordBatch:
    """Return a frame with the column `role` added, and no additional rows."""
    return frame.append_column("role", pa.array(np.full(frame.num_rows, CHANGE, np.uint8)))


def changed_keys(frame: pa.RecordBatch) -> tuple[Longs, pa.StringArray]:
    """Return the numbers of the rows whose update changes the key, and their old keys."""
    updates = _named(frame.column("op"), "u")
    for image in ("before", "key"):
        updates &= frame.column(image).is_valid().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(updates)
    key_ends, key = layout(cast("pa.StringArray", frame.column("key")))
    old_ends, old = layout(cast("pa.StringArray", frame.column("before")))
    room = int((np.diff(key_ends)[rows] + np.diff(old_ends)[rows] + 2).sum())
    out = np.empty(room, np.uint8)
    ends = np.zeros(len(rows) + 1, np.int32)
    changed = np.empty(len(rows), np.int64)
    count = _old_keys(rows, key, key_ends, old, old_ends, out, ends, changed)
    keys = pa.StringArray.from_buffers(
        count, pa.py_buffer(ends[: count + 1].data), pa.py_buffer(out[: ends[count]].data)
    )
    return changed[:count], keys


def _divided(rows: pa.RecordBatch, roles: _Roles, old_keys: pa.StringArray) -> pa.RecordBatch:
    """Turn the rows for the halves of split updates into deletes and inserts."""
    deletes = (roles == DELETE_HALF) | (roles == HALF_TOMBSTONE)
    inserts = roles == INSERT_HALF
    twice = 2 if (roles == HALF_TOMBSTONE).any() else 1
    keys = old_keys.take(np.repeat(np.arange(len(old_keys)), twice))
    ids = cast("list[str]", rows.column("event_id").filter(pa.array(inserts)).to_pylist())
    copies = pa.array([copy_id(event_id, _COPY[INSERT_HALF]) for event_id in ids], pa.string())
    changed: dict[str, pa.Array[Any]] = {
        "op": _with_ops(cast("pa.DictionaryArray[Any, Any]", rows.column("op")), deletes, inserts),
        "before": _nulled(rows.column("before"), inserts),
        "after": _nulled(rows.column("after"), deletes),
        "key": pc.replace_with_mask(rows.column("key"), pa.array(deletes), keys),
        "event_id": pc.replace_with_mask(rows.column("event_id"), pa.array(inserts), copies),
        "tx_end": pc.and_(rows.column("tx_end"), pa.array(~deletes)),
    }
    return _with_columns(rows, changed)


def _with_ops(
    ops: pa.DictionaryArray[Any, Any], deletes: Mask, inserts: Mask
) -> pa.DictionaryArray[Any, Any]:
    names = ops.dictionary.to_pylist()
    names += [op for op in "cd" if op not in names]
    codes = ops.indices.to_numpy().copy()
    codes[deletes], codes[inserts] = names.index("d"), names.index("c")
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))


def _nulled(column: pa.Array[Any], mask: Mask) -> pa.Array[Any]:
    kept: pa.Array[Any] = pc.if_else(pa.array(mask), pa.scalar(None, column.type), column)
    return kept


def _with_columns(rows: pa.RecordBatch, changed: dict[str, pa.Array[Any]]) -> pa.RecordBatch:
    names = rows.schema.names
    columns = [changed.get(name, rows.column(name)) for name in names]
    return pa.RecordBatch.from_arrays(columns, names)


def identified(frame: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.StringArray]:
    """Return an expanded frame whose tombstones have their own ids, too, and the changes' ids.

    The id of a change is null for rows whose own id is that of their change.
    """
    roles = frame.column("role").to_numpy()
    ids = cast("pa.StringArray", frame.column("event_id"))
    copies = np.isin(roles, list(_COPY))
    if not copies.any():
        return frame, pa.nulls(frame.num_rows, pa.string())
    firsts = np.maximum.accumulate(np.where(copies, 0, np.arange(frame.num_rows)))
    changes = ids.take(firsts)
    own = [
        copy_id(change_id, _COPY[role])
        for change_id, role in zip(
            cast("list[str]", changes.filter(pa.array(copies)).to_pylist()),
            roles[copies].tolist(),
            strict=True,
        )
    ]
    message_ids = pc.replace_with_mask(ids, pa.array(copies), pa.array(own, pa.string()))
    own_ids = _with_columns(frame, {"event_id": message_ids})
    return own_ids, cast("pa.StringArray", _nulled(changes, ~copies))


def without_tombstones(
    make: Callable[[pa.RecordBatch], pa.Array[Any]], frame: pa.RecordBatch
) -> pa.Array[Any]:
    """Return the values that `make` returns for an expanded frame, with null for tombstones."""
    values, tombstone_rows = make(frame), tombstones(frame)
    return _nulled(values, tombstone_rows) if tombstone_rows.any() else values


def tombstones(frame: pa.RecordBatch) -> Mask:
    """Return a mask of the rows of an expanded frame whose messages have no value."""
    roles = frame.column("role").to_numpy()
    return cast("Mask", (roles == TOMBSTONE) | (roles == HALF_TOMBSTONE))


def copy_id(event_id: str, number: int, by: str = "") -> str:
    """Return the id of the `number`th message of a change, for the second and later messages.

    `by` is the processor that made a copy. The id is a function of all arguments: a version 7 UUID
    (RFC 9562, section 5.7) with the timestamp of the change's own id, whose other bits are a hash.
    """
    text = f"{event_id}/{number}/{by}".encode()
    digits = hashlib.blake2b(text, digest_size=10, person=b"event_copy").hexdigest()
    variant = "89ab"[int(digits[3], 16) & 3]
    return f"{event_id[:15]}{digits[:3]}-{variant}{digits[4:7]}-{digits[7:19]}"


@kernel
def _old_keys(
    rows: Longs,
    key: Bytes,
    key_ends: npt.NDArray[np.int32],
    old: Bytes,
    old_ends: npt.NDArray[np.int32],
    out: Bytes,
    ends: npt.NDArray[np.int32],
    changed: Longs,
) -> int:
    """Write the old keys of those `rows` whose key changed; return how many there are.

    `changed` receives their row numbers, `ends[n + 1]` the end of the n-th text in `out`.
    """
    count = 0
    for row in rows:
        end = _old_key(
            key, int(key_ends[row]), int(key_ends[row + 1]),
            old, int(old_ends[row]), int(old_ends[row + 1]), out, int(ends[count]),
        )  # fmt: skip
        if end >= 0:
            changed[count] = row
            count += 1
            ends[count] = end
    return count


# A key is a JSON object of scalars, as the sources write it:
#
#   {"id":1,"part":"a"}     names in the table's order; each is looked up in the old row image
#    ^at  ^value


@kernel
def _old_key(
    key: Bytes, at: int, stop: int, old: Bytes, first: int, last: int, out: Bytes, position: int
) -> int:
    """Write the key with the old row's values.

    Returns:
        The position after the key; `_SAME` if it equals the new key; `_NO_COLUMN` if the old row
        lacks a
        column of it.
    """
    if key[at] != OPEN_BRACE or old[first] != OPEN_BRACE:
        return _NO_COLUMN
    same = True
    separator = OPEN_BRACE
    at += 1
    while at < stop:
        while at < stop and (blank(key[at]) or key[at] == COMMA):
            at += 1
        if at == stop or key[at] != QUOTE:
            break
        name = at
        name_end = string_end(key, at, stop)
        at = name_end
        while blank(key[at]) or key[at] == COLON:
            at += 1
        end = value_end(key, at, stop)
        begin = _member(old, first, last, key, name, name_end)
        if begin < 0:
            return _NO_COLUMN
        finish = value_end(old, begin, last)
        if finish - begin != end - at:
            same = False
        else:
            for byte in range(end - at):
                if key[at + byte] != old[begin + byte]:
                    same = False
                    break
        out[position] = separator
        separator = COMMA
        position = copy(key, name, name_end, out, position + 1)
        out[position] = COLON
        position = copy(old, begin, finish, out, position + 1)
        at = end
    if same:
        return _SAME
    out[position] = CLOSE_BRACE
    return position + 1


@kernel
def _member(old: Bytes, at: int, stop: int, key: Bytes, name: int, name_end: int) -> int:
    """Return where the value of a member begins, -1 without such a member.

    The name is the text from `name` to `name_end` in `key`, with its quotes.
    """
    at += 1
    while at < stop:
        while at < stop and (blank(old[at]) or old[at] == COMMA):
            at += 1
        if at == stop or old[at] != QUOTE:
            return -1
        begin = at
        at = string_end(old, at, stop)
        same = at - begin == name_end - name
        for byte in range(at - begin if same else 0):
            if old[begin + byte] != key[name + byte]:
                same = False
                break
        while blank(old[at]) or old[at] == COLON:
            at += 1
        if same:
            return at
        at = value_end(old, at, stop)
    return -1
