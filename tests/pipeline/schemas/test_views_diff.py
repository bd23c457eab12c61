"""What is different between two versions of a table."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.pipeline.schemas.views import differences
from deltaforge_dagster.state.schemas import fingerprint
from deltaforge_dagster.tables import Column, TableSchema

BEFORE = TableSchema(
    "shop",
    None,
    "orders",
    (
        Column("id", "int", None, nullable=False, ordinal_position=1),
        Column("note", "text", None, nullable=True, ordinal_position=2),
        Column("state", "enum('a')", None, nullable=True, ordinal_position=3),
    ),
    ("id",),
)


def said(after: TableSchema) -> list[str]:
    """Return the lines for what `BEFORE` became."""
    return [str(one) for one in differences(BEFORE, after)]


def test_every_kind_is_one_line() -> None:
    """Added, dropped, another type, another nullability, another place, another key."""
    id_, note, state = BEFORE.columns
    wider = replace(id_, data_type="bigint")
    mail = Column("mail", "text", None, nullable=False, ordinal_position=3)

    assert said(replace(BEFORE, columns=(id_, replace(state, ordinal_position=2), mail))) == [
        "- note text",
        "+ mail text not null",
    ]
    assert said(replace(BEFORE, columns=(wider, replace(note, nullable=False), state))) == [
        "~ id: int not null -> bigint not null",
        "~ note: text -> text not null",
    ]
    moved = replace(note, ordinal_position=1), replace(id_, ordinal_position=2), state
    assert said(replace(BEFORE, columns=moved)) == [
        "~ id: column 1 -> 2",
        "~ note: column 2 -> 1",
    ]
    assert said(replace(BEFORE, primary_key=("id", "note"))) == ["~ key: id -> id, note"]
    assert said(replace(BEFORE, primary_key=())) == ["~ key: id -> none"]
    again = differences(BEFORE, BEFORE, {"note"})  # dropped, and another one added
    assert [str(one) for one in again] == ["- note text", "+ note text"]


_COLUMNS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(["int", "text"]), st.booleans(), st.integers(1, 2)
    ),
    unique_by=lambda one: one[0],
    max_size=4,
)


def _table(columns: list[tuple[str, str, bool, int]], keys: int) -> TableSchema:
    made = tuple(
        Column(name, type_, oid, nullable, place)
        for place, (name, type_, nullable, oid) in enumerate(columns, start=1)
    )
    return TableSchema("shop", None, "t", made, tuple(one.name for one in made[:keys]))


@given(_COLUMNS, _COLUMNS, st.integers(0, 2), st.integers(0, 2))
def test_another_version_is_never_without_a_difference(
    before: list[tuple[str, str, bool, int]],
    after: list[tuple[str, str, bool, int]],
    keys: int,
    other_keys: int,
) -> None:
    """Two tables have no difference exactly when they have one fingerprint."""
    old, new = _table(before, keys), _table(after, other_keys)

    assert bool(differences(old, new)) is (fingerprint(old) != fingerprint(new))
