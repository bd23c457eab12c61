"""What tasks make of changes: keys, columns that processors add, and which changes a sink gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.sinks.postgres.types import TARGET_TYPES
from deltaforge_dagster.sinks.tables.staged import StagedCommit, StagedStep
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, ColumnChanges
from deltaforge_dagster.typed_rows.schema import TargetTypes
from tests.pipeline.encode.test_encoder import segment
from tests.pipeline.tables.changes import change, stager_here, table
from tests.processors.rows import Row
from tests.state.make import held, position

Stage = Callable[..., StagedCommit]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal((tmp_path / "journal").as_uri())


@pytest.fixture
def version(sqlite_store: StateStore) -> str:
    """The fingerprint of the only version of `public.orders`, with columns id, a and b."""
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        return writer.schemas.register("acme", table("id", "a", "b"), position(1)).fingerprint


@pytest.fixture
def stage(tmp_path: Path, journal: Journal, sqlite_store: StateStore) -> Stage:
    """Stages changes, those of each list in a segment and a task of their own."""

    def of(
        *changes: Sequence[Row],
        options: str = "mode: current",
        sinks: Sequence[str] = (),
        types: TargetTypes | None = None,
    ) -> StagedCommit:
        segments: list[SegmentRow] = [
            dataclasses.replace(segment(journal, number, rows), sinks=sinks)
            for number, rows in enumerate(changes, 1)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoder, "TASK_BYTES", 1 + min(one.bytes for one in segments) // 2)
            stager = stager_here(tmp_path, journal, sqlite_store, options, types)
            return stager.stage(segments)

    return of


def steps(commit: StagedCommit) -> Sequence[StagedStep]:
    """Return the steps of the only table."""
    assert not commit.failed
    (found,) = commit.tables
    return found.steps


def rows(step: StagedStep, *names: str) -> list[tuple[Any, ...]]:
    """Return some columns of a step's rows, sorted."""
    found = [row for path in step.files for row in pq.read_table(path).to_pylist()]
    return sorted((tuple(one[name] for name in names) for one in found), key=repr)


def error(commit: StagedCommit) -> str:
    """Return why the only table cannot be staged."""
    assert not commit.tables
    (found,) = commit.failed.values()
    return str(found)


def test_images_without_the_key(version: str, stage: Stage) -> None:
    """MySQL's minimal images of an update lack the key, which the key's image or the image before has."""
    commit = stage(
        [
            change("u", 1, version, after={"a": 5}, key={"id": 1}),
            change("u", 2, version, before={"id": 2}, after={"a": 6}, key=None),
            change("u", 3, version, before={"id": 3}, after={"a": 7}, key={"id": 4}),
        ]
    )
    first, rekey = steps(commit)
    assert rows(first, "id", "a", "b", "df_absent") == [(1, 5, None, ["b"]), (2, 6, None, ["b"])]
    assert rows(rekey, "df_old_id", "id", "a", "df_absent") == [(3, 4, 7, ["b"])]


def test_another_key(version: str, stage: Stage) -> None:
    """`keys` replaces the primary key, also where updates change it; values are compared, not their spelling."""
    commit = stage(
        [
            change("c", 1, version, after={"id": 1, "a": 1, "b": 1}),
            change("u", 2, version, before={"a": 1, "b": 1}, after={"id": 2, "a": 1, "b": 2}),
            change("u", 3, version, before={"a": 5, "b": 5}, after={"id": 3, "a": "5", "b": 5.0}),
        ],
        options="keys: {public.orders: [b, a]}",
    )
    (step,) = steps(commit)
    assert rows(step, "df_op", "b", "a", "id") == [
        ("d", 1, 1, None), ("u", 2, 1, 2), ("u", 5, 5, 3),
    ]  # fmt: skip
    assert commit.tables[0].key == ("b", "a")


def test_a_changelog_says_that_an_old_key_has_ended(version: str, stage: Stage) -> None:
    """Before an update of the key is a delete of the old one, at its place, with the image before and an id of its own."""
    changes = [
        change("u", 1, version, before={"id": 1}, after={"id": 1, "a": 1, "b": 1}),
        change("u", 2, version, before={"id": 1}, after={"id": 2, "a": 2, "b": 2}),
        change("u", 3, version, before={"id": 2, "a": 2, "b": 2}, after={"id": 1, "a": 3, "b": 3}),
        change("u", 4, version, before={"id": 1}, after={"a": 4}, key={"id": 1}),
    ]
    changes = [{**one, "event_id": f"event {number}"} for number, one in enumerate(changes)]
    (step,) = steps(stage(changes, options="mode: changelog"))
    (path,) = step.files
    found = pq.read_table(path).to_pylist()
    names = ("df_op", "id", "a", "b", "df_absent", "df_ordinal")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("u", 1, 1, 1, None, 0),
        ("d", 1, None, None, ["a", "b"], 1), ("u", 2, 2, 2, None, 1),
        ("d", 2, 2, 2, None, 2), ("u", 1, 3, 3, None, 2),
        ("u", 1, 4, None, ["b"], 3),
    ]  # fmt: skip
    assert len({row["df_event_id"] for row in found}) == step.rows == 6
    assert len({row["df_source_position"] for row in found}) == 4
    (again,) = steps(stage(changes, options="mode: changelog"))
    assert rows(again, "df_event_id") == rows(step, "df_event_id")


def test_floats_that_databases_take_for_the_same_key(
    stage: Stage, sqlite_store: StateStore
) -> None:
    """An update of 0 to -0, or of a row whose key is NaN, changes no key: nothing is deleted."""
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        floats = table("id", "a", type_="double precision")
        version = writer.schemas.register("acme", floats, position(1)).fingerprint
    commit = stage(
        [
            change("u", 1, version, before={"id": 0.0, "a": 1}, after={"id": -0.0, "a": 2}),
            change("u", 2, version, before={"id": "NaN", "a": 1}, after={"id": "NaN", "a": 3}),
        ]
    )
    (step,) = steps(commit)
    assert rows(step, "df_op", "a") == [("u", 2.0), ("u", 3.0)]


@pytest.mark.parametrize("image", [{"b": 1}, {"id": 1, "a": None}])
def test_changes_without_a_key(version: str, stage: Stage, image: dict[str, Any]) -> None:
    """A change without a value of a key column cannot be merged: the table fails, with column and place."""
    made = change("d", 1, version, before=image)
    text = error(stage([made], options="keys: {public.orders: [a]}"))
    assert "segment 1, ordinal 0" in text
    assert "key column a" in text


@pytest.mark.parametrize("mode", ["current", "history", "changelog"])
def test_rows_whose_columns_may_be_others(
    sqlite_store: StateStore, stage: Stage, mode: str
) -> None:
    """A commit with rows of both versions is refused, and names the remedy; with rows of one it is not."""
    lease = held(sqlite_store)
    unknown = ColumnChanges(certain=False)
    with sqlite_store.fenced(lease) as writer:
        old = writer.schemas.register("acme", table("id", "a"), position(1)).fingerprint
        writer.schemas.alter("acme", table("id"), unknown, position(2))
        new = writer.schemas.register("acme", table("id", "b"), position(3)).fingerprint
    before, after = (
        change("c", number, version, after={"id": number, name: 5})
        for number, version, name in ((1, old, "a"), (2, new, "b"))
    )
    text = error(stage([before, after], options=f"mode: {mode}"))
    assert "whether its column id is one that was there before is not known" in text
    assert "deltaforge resync orders --sink" in text
    assert not stage([after], options=f"mode: {mode}").failed


def test_a_table_that_is_truncated_before_it_has_rows(stage: Stage) -> None:
    """Nothing is known of it, and nothing is to be done; a changelog has the truncate."""
    commit = stage([change("t", 1, None)])
    assert (commit.tables, commit.failed) == ([], {})
    commit = stage([change("t", 1, None)], options="mode: changelog")
    (step,) = steps(commit)
    assert rows(step, "df_op") == [("t",)]


def test_a_key_of_uuids(sqlite_store: StateStore, stage: Stage) -> None:
    """It is folded as any other, in whatever image of a row it is."""
    keys = [f"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1{number}" for number in range(4)]
    columns = (Column("id", "uuid", 2950, False, 1), Column("a", "integer", 23, True, 2))
    described = dataclasses.replace(table("id", "a"), columns=columns)
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        version = writer.schemas.register("acme", described, position(1)).fingerprint
    commit = stage(
        [
            change("c", 1, version, after={"id": keys[0], "a": 1}),
            change("c", 2, version, after={"id": keys[1], "a": 2}),
            change("u", 3, version, before={"id": keys[0], "a": 1}, after={"id": keys[2], "a": 3}),
            change("u", 4, version, after={"a": 4}, key={"id": keys[1]}),
            change("d", 5, version, before={"id": keys[3]}),
        ],
        types=TARGET_TYPES,
    )
    (step,) = steps(commit)
    found = {str(uuid): (op, a) for uuid, op, a in rows(step, "id", "df_op", "a")}
    assert found == {
        keys[0]: ("d", None), keys[1]: ("u", 4), keys[2]: ("u", 3), keys[3]: ("d", None),
    }  # fmt: skip


def test_a_column_that_comes_later(sqlite_store: StateStore, stage: Stage) -> None:
    """Rows of the time before a table had a column are null there; those of the time after it was dropped lack it."""
    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        first, second, third = (
            writer.schemas.register("acme", table(*columns), position(number)).fingerprint
            for number, columns in enumerate([("id", "a"), ("id", "a", "b"), ("id", "b")], 1)
        )
    commit = stage(
        [
            change("u", 1, first, before={"id": 1}, after={"id": 2, "a": 1}),
            change("c", 2, second, after={"id": 3, "a": 2, "b": 2}),
            change("u", 3, third, after={"id": 4, "b": 3}),
        ]
    )
    (step,) = steps(commit)
    assert rows(step, "df_op", "id", "a", "b", "df_absent") == [
        ("d", 1, None, None, None),
        ("u", 2, 1, None, None),
        ("u", 3, 2, 2, None),
        ("u", 4, None, 3, ["a"]),
    ]


@pytest.fixture
def register(sqlite_store: StateStore) -> Callable[..., list[str]]:
    """Registers versions of `public.orders` with column id, the key, and others; `new<old` is one that was renamed."""
    lease = held(sqlite_store)

    def of(*versions: Sequence[str], key: str = "id") -> list[str]:
        found = []
        with sqlite_store.fenced(lease) as writer:
            for number, columns in enumerate(versions, 1):
                renamed = dict(one.split("<") for one in columns if "<" in one)
                made = table("id", *(one.partition("<")[0] for one in columns))
                made = dataclasses.replace(made, primary_key=(key,))
                if number > 1 and key in renamed.values():
                    new = next(name for name, old in renamed.items() if old == key)
                    made = dataclasses.replace(made, primary_key=(new,))
                writer.schemas.alter("acme", made, ColumnChanges(renamed), position(number))
                stamp = writer.schemas.register("acme", made, position(number))
                found.append(stamp.fingerprint)
        return found

    return of


def test_rows_from_before_a_column_was_added(sqlite_store: StateStore, stage: Stage) -> None:
    """They have what the source gave them there, if that is known; a changelog has them as they were."""
    first, second = (table("id", *columns) for columns in ((), ("n", "unknown", "null")))
    fills = {"n": "7", "null": "null"}
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        old = writer.schemas.register("acme", first, position(0)).fingerprint
        changes = ColumnChanges(added=frozenset(fills), fills=fills)
        writer.schemas.alter("acme", first, changes, position(1))
        new = writer.schemas.register("acme", second, position(0xF000)).fingerprint
    rows_of_both = [
        change("c", 1, old, after={"id": 1}),
        change("u", 2, old, after={"id": 2}),
        change("u", 3, new, after={"id": 2, "unknown": 3}),
        change("c", 4, new, after={"id": 3, "n": None, "unknown": 1, "null": 1}),
    ]
    commit = stage(rows_of_both)
    (step,) = steps(commit)
    assert rows(step, "id", "n", "unknown", "null") == [(1, 7, None, None), (2, 7, 3, None), (3, None, 1, 1)]  # fmt: skip
    (found,) = commit.tables
    assert found.fills == {"n": "7"}
    assert found.unfilled == {"unknown"}
    commit = stage(rows_of_both, options="mode: changelog")
    (step,) = steps(commit)
    assert rows(step, "id", "n")[:2] == [(1, None), (2, None)]
    assert not commit.tables[0].fills
    assert not commit.tables[0].unfilled


def test_a_form_that_comes_again(register: Callable[..., list[str]], stage: Stage) -> None:
    """Rows that have it after a column was dropped lack that column."""
    first, second, again = register(("a",), ("a", "b"), ("a",))
    assert again == first
    changes = [
        change("u", 5, first, after={"id": 5, "a": 5}),
        change("c", 6, second, after={"id": 6, "a": 6, "b": 6}),
    ]
    (step,) = steps(stage(changes))
    assert rows(step, "id", "a", "b", "df_absent") == [(5, 5, None, ["b"]), (6, 6, 6, None)]


def test_renamed_columns(register: Callable[..., list[str]], stage: Stage) -> None:
    """Rows have the values of a column under its last name, also where names are swapped or used again."""
    first, second = register(("a", "b"), ("b<a", "a<b", "c"))
    commit = stage(
        [change("c", 1, first, after={"id": 1, "a": 1, "b": 2})],
        [
            change("u", 2, first, after={"id": 2, "a": 3, "b": {"_unchanged": True}}),
            change("c", 3, second, after={"id": 3, "a": 4, "b": 5, "c": 6}),
        ],
    )
    (step,) = steps(commit)
    assert rows(step, "id", "a", "b", "c", "df_absent") == [
        (1, 2, 1, None, None), (2, None, 3, None, ["a"]), (3, 4, 5, 6, None),
    ]  # fmt: skip
    (found,) = commit.tables
    assert found.identities == {"id": "id@1", "b": "a@1", "a": "b@1", "c": "c@2"}

    (again,) = stage([change("c", 4, first, after={"id": 4, "a": 1, "b": 2})]).tables
    assert again.identities == {"id": "id@1", "a": "a@1", "b": "b@1"}


def test_a_name_that_is_used_again(register: Callable[..., list[str]], stage: Stage) -> None:
    """A new column with the name that another one had is null in rows from before; in a changelog, too."""
    first, second = register(("a",), ("b<a", "a"))
    changes = [
        change("c", 1, first, after={"id": 1, "a": 1}),
        change("u", 2, first, after={"id": 1, "a": 2}),
        change("c", 3, second, after={"id": 3, "a": 4, "b": 5}),
    ]
    (step,) = steps(stage(changes))
    assert rows(step, "id", "a", "b", "df_absent") == [(1, None, 2, None), (3, 4, 5, None)]
    (step,) = steps(stage(changes, options="mode: changelog"))
    assert rows(step, "id", "a", "b") == [(1, None, 1), (1, None, 2), (3, 4, 5)]


def test_a_renamed_key(register: Callable[..., list[str]], stage: Stage) -> None:
    """Keys before and after are the same, in whatever image of a row they are."""
    first, second = register(("k", "a"), ("n<k", "a"), key="k")
    commit = stage(
        [
            change("c", 1, first, after={"id": 1, "k": 1, "a": 1}),
            change("u", 2, first, before={"k": 1}, after={"id": 1, "k": 2, "a": 1}),
            change("u", 3, first, after={"a": 5}, key={"k": 7}),
            change("u", 4, second, after={"id": 1, "n": 2, "a": 9}),
            change("d", 5, second, key={"n": 7}),
        ]
    )
    (step,) = steps(commit)
    assert rows(step, "df_op", "n", "a") == [("d", 1, None), ("d", 7, None), ("u", 2, 9)]


def test_a_processor_s_field_with_the_name_of_a_renamed_column(
    register: Callable[..., list[str]], stage: Stage
) -> None:
    """Rows with both cannot be stored; a name that a dropped column had, neither."""
    first, second = register(("a",), ("b<a",))
    changes = [
        change("c", 1, first, after={"id": 1, "a": 1, "b": "x"}),
        change("c", 2, second, after={"id": 2, "b": 5}),
    ]
    assert "a processor adds the field b" in error(stage(changes))


def test_a_name_that_a_dropped_column_had(register: Callable[..., list[str]], stage: Stage) -> None:
    """The dropped column is called by a name of its own, in rows that have it."""
    first, second = register(("a", "b"), ("b<a",))
    commit = stage(
        [
            change("c", 1, first, after={"id": 1, "a": 1, "b": 2}),
            change("c", 2, second, after={"id": 2, "b": 5}),
        ]
    )
    (step,) = steps(commit)
    assert rows(step, "id", "b", "b_dropped_1") == [(1, 1, 2), (2, 5, None)]
    (found,) = commit.tables
    assert found.identities == {"id": "id@1", "b": "a@1", "b_dropped_1": "b@1"}


def test_a_column_that_is_dropped_and_added_again(
    register: Callable[..., list[str]], stage: Stage
) -> None:
    """It is another column: null in rows from before; what an update lacks of the dropped one is not null."""
    first, second, third = register(("a", "b"), ("b",), ("b", "a"))
    changes = [
        change("u", 1, first, after={"id": 1, "a": 1, "b": 2}),
        change("u", 2, first, after={"id": 2, "a": {"_unchanged": True}, "b": 2}),
        change("u", 3, second, after={"id": 3, "b": 3}),
        change("u", 4, third, after={"id": 4, "b": 4, "a": 5}),
    ]
    (step,) = steps(stage(changes))
    dropped = "a_dropped_1"
    assert rows(step, "id", "a", dropped, "df_absent") == [
        (1, None, 1, None), (2, None, None, [dropped]), (3, None, None, [dropped]), (4, 5, None, [dropped]),
    ]  # fmt: skip


def test_declared_types_go_by_the_last_name(
    register: Callable[..., list[str]], stage: Stage
) -> None:
    """They apply to rows from before as well."""
    first, second = register(("a",), ("b<a",))
    changes = [
        change("c", 1, first, after={"id": 1, "a": 1}),
        change("c", 2, second, after={"id": 2, "b": 5}),
    ]
    commit = stage(changes, options="mode: current, types: {public.orders: {b: text}}")
    (step,) = steps(commit)
    assert rows(step, "id", "b") == [(1, "1"), (2, "5")]


def test_added_fields(stage: Stage) -> None:
    """Fields and tables of processors are text; an update in a file without a field lacks it, an insert has null."""
    commit = stage(
        [change("c", 1, None, after={"id": "x", "more": 1})],
        [change("u", 2, None, after={"id": "y"}), change("c", 3, None, after={"id": "z"})],
        options="keys: {public.orders: [id]}",
    )
    (step,) = steps(commit)
    assert rows(step, "id", "more", "df_absent") == [
        ("x", "1", None), ("y", None, ["more"]), ("z", None, None),
    ]  # fmt: skip
    assert [one.name for one in commit.tables[0].columns.columns] == ["id", "more"]


def test_chosen_changes(version: str, stage: Stage) -> None:
    """A sink gets neither operations that it skips, nor what its filter leaves out, nor segments for others."""
    changes = [
        change("c", 1, version, after={"id": 1}),
        change("d", 2, version, before={"id": 1}),
        change("t", 3, version),
    ]
    (step,) = steps(stage(changes, options="skipped_operations: [d, t]"))
    assert rows(step, "df_op", "id") == [("u", 1)]
    assert step.inserts_only
    assert not stage(changes, options="filter: {synthetic_only: true}").tables
    assert not stage(changes, sinks=("other",)).tables


def test_one_key_in_two_spellings(version: str, stage: Stage) -> None:
    """Text keys of any characters are told apart byte by byte, and are the same in every task."""
    texts = ["a", "A", "ä", "", "a ", "\U0001f600"]
    changes = [change("c", 1, version, after={"id": one, "a": 1}) for one in texts]
    again = [change("u", 1, version, after={"id": one, "a": 2}) for one in texts]
    (step,) = steps(stage(changes, again, options="types: {public.orders: {id: text}}"))
    assert rows(step, "id", "a") == sorted(((one, 2) for one in texts), key=repr)
