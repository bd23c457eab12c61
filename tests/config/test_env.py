import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.env import Note, expand, unresolved

NAME = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("a ${HOST} b", "a db1 b"),
        ("$HOST:5432", "db1:5432"),
        ("${PORT:-5432}", "5432"),
        ("${EMPTY:-5432}", "5432"),
        ("${HOST:-other}", "db1"),
        ("${EMPTY}", ""),
        ("$$HOST costs 5$$", "$HOST costs 5$"),
        ("$${HOST}", "${HOST}"),
        ("${PORT:-}", ""),
        ("${source.table}", "${source.table}"),
        ("$1 and $. and 5$", "$1 and $. and 5$"),
        ("${unclosed", "${unclosed"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    """Known variables and defaults are expanded; text that is not a reference stays unchanged."""
    assert expand(text, {"HOST": "db1", "EMPTY": ""})[0] == expanded


def test_unknown_variables_stay_with_a_note() -> None:
    """An unknown variable stays as `${NAME}`, whichever way it was written, and is reported."""
    expanded, notes = expand("a: ${NOPE}\nb: $nope\n", {})

    assert expanded == "a: ${NOPE}\nb: ${nope}\n"
    assert notes == [
        Note(1, "NOPE", "${NOPE} stays as it is: no environment variable NOPE is set"),
        Note(2, "nope", "${nope} stays as it is: no environment variable nope is set"),
    ]


def test_event_fields_are_expected_to_stay() -> None:
    """Paths into the event and its top-level fields do not count as unknown environment variables."""
    assert expand("${source.table} ${op} ${tenant_id}", {})[1] == []


def test_a_variable_named_like_an_event_field_is_reported() -> None:
    """An environment variable `op` would silently break routing by `${op}`, so a note reports it."""
    expanded, notes = expand("x\n${op}", {"op": "secret"})

    assert expanded == "x\nsecret"
    assert [note.line for note in notes] == [2]
    assert "secret" not in notes[0].text


@given(st.text(st.characters(exclude_characters="$")))
def test_text_without_dollar_never_changes(text: str) -> None:
    """Expansion changes nothing but references."""
    assert expand(text, {"A": "x"}) == (text, [])


@given(st.dictionaries(NAME, st.text()), st.text(), st.text())
def test_every_known_variable_becomes_its_value(
    environment: dict[str, str], before: str, after: str
) -> None:
    """A value is inserted unchanged, and is not expanded again."""
    for name, value in environment.items():
        text = f"{before.replace('$', '')}${{{name}}}{after.replace('$', '')}"

        expanded = expand(text, environment)[0]

        assert expanded == text.replace(f"${{{name}}}", value)


@given(st.text())
def test_doubled_dollars_protect_any_text(text: str) -> None:
    """Text in which every dollar sign is doubled comes out as the original, whatever the environment."""
    assert expand(text.replace("$", "$$"), {"A": "x"}) == (text, [])


@given(st.text(st.sampled_from("${}:-AB_.\n")))
def test_expansion_of_what_is_unknown_is_stable(text: str) -> None:
    """Without escapes and defaults, expanding unknown variables is idempotent."""
    plain = re.sub(r"\$+", "$", text.replace(":-", ""))
    once = expand(plain, {})[0]

    assert expand(once, {})[0] == once


def test_unresolved_names_what_is_left() -> None:
    """A field that is not a template can find the first unexpanded variable."""
    assert unresolved("postgres://${PG_HOST}/x") == "PG_HOST"
    assert unresolved("postgres://host/x") is None
