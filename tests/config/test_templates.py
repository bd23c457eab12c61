import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.templates import (
    Template,
    Variable,
    compile_template,
    unknown_variable,
)
from deltaforge_dagster.errors import SpecError

SEGMENT = st.text(st.characters(exclude_characters="${}."), min_size=1).filter(str.strip)
LITERAL = st.text(st.characters(exclude_characters="$"), min_size=1)
PATH = st.lists(SEGMENT, min_size=1, max_size=3).map(tuple)


def test_literals_and_variables_alternate() -> None:
    """A template is split into literals and dotted paths, in order."""
    template = compile_template("cdc.${source.db}.${after.customer_id}!")

    assert template.parts == (
        "cdc.",
        Variable(("source", "db")),
        ".",
        Variable(("after", "customer_id")),
        "!",
    )
    assert template.variables == (Variable(("source", "db")), Variable(("after", "customer_id")))


def test_text_without_variables_is_static() -> None:
    """A lone dollar sign or brace is literal text."""
    assert compile_template("orders$} {x").parts == ("orders$} {x",)
    assert compile_template("orders").variables == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a${op", "unclosed '${' at position 1 in template: a${op"),
        ("ab${}", "empty variable '${}' at position 2 in template: ab${}"),
        ("${ }", "empty variable '${}' at position 0 in template: ${ }"),
        ("${a.b.c.d}", "path 'a.b.c.d' exceeds max depth of 3 segments in template: ${a.b.c.d}"),
        ("${a..b}", "path 'a..b' has an empty segment in template: ${a..b}"),
    ],
)
def test_wrong_template(text: str, message: str) -> None:
    """Each kind of invalid variable has its own message, with its position."""
    with pytest.raises(SpecError) as caught:
        compile_template(text)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("${source.table}.${after.anything}.${op}.${transaction.id}", None),
        ("a.${source.tabel}", "source.tabel"),
        ("${op}${HOME}", "HOME"),
    ],
)
def test_variables_that_no_event_has_are_found(text: str, unknown: str | None) -> None:
    """Names of columns are arbitrary; all other variables are known in advance."""
    assert unknown_variable(compile_template(text)) == unknown


@given(st.lists(st.tuples(LITERAL, PATH)))
def test_any_template_is_read_back_from_its_parts(
    pieces: list[tuple[str, tuple[str, ...]]],
) -> None:
    """Any sequence of literals and paths is parsed back into the same parts."""
    parts: list[str | Variable] = []
    for literal, path in pieces:
        parts += [literal, Variable(path)]
    text = "".join(
        part if isinstance(part, str) else f"${{{'.'.join(part.path)}}}" for part in parts
    )

    assert compile_template(text) == Template(text, tuple(parts))


@given(st.text(st.sampled_from("${}.ab ")))
def test_any_text_compiles_or_is_refused(text: str) -> None:
    """The compiler accepts any text or raises its own error."""
    try:
        template = compile_template(text)
    except SpecError:
        return

    written = (
        part if isinstance(part, str) else f"${{{'.'.join(part.path)}}}" for part in template.parts
    )
    assert "".join(written) == text
