import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.file.document import DocumentProblem, format_path, parse


def test_values_and_lines() -> None:
    """Every key and list item has its line number."""
    document = parse("a: 1\nb:\n  - x: true\n  - [1.5, text]\n")

    assert document.value == {"a": 1, "b": ({"x": True}, (1.5, "text"))}
    assert document.problems == []
    assert document.line(("b",)) == 2
    assert document.line(("b", 0, "x")) == 3
    assert document.line(("b", 1, 0)) == 4


def test_what_is_absent_has_the_line_of_what_should_hold_it() -> None:
    """A missing field has the line of the block that should contain it."""
    document = parse("a: 1\nb:\n  c: 2\n")

    assert document.line(("b", "missing", 0)) == 2
    assert document.line(("nowhere",)) == 1


@pytest.mark.parametrize("text", ["yes", "on", "No", "12:30", "2024-01-01", "1_000", "0/16B6C50"])
def test_text_that_yaml_1_1_would_change_stays_text(text: str) -> None:
    """Scalars follow YAML 1.2, as the original reads them."""
    assert parse(f"a: {text}").value == {"a": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("0x1F", 31),
        ("0o17", 15),
        ("-5", -5),
        ("1e3", 1000.0),
        (".inf", float("inf")),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    """Numbers and booleans of the core schema are parsed as such."""
    assert parse(f"a: {text}").value == {"a": value}


def test_key_without_value_is_absent() -> None:
    """`labels:` without a value is equivalent to no `labels`."""
    assert parse("a:\nb: ~\nc: 1").value == {"c": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: 1\nb: 2\na: 3",
            DocumentProblem(("a",), "is given twice, first in line 1 (keep one)", 3),
        ),
        (
            "a: &x {b: 1}\nc:\n  <<: *x",
            DocumentProblem(("c", "<<"), "merge keys are not supported (write the fields out)", 3),
        ),
        ("a: !secret b", DocumentProblem(("a",), "has a YAML tag (remove it)", 1)),
        ("a: !!int b", DocumentProblem(("a",), "is tagged !!int, but is not a valid int", 1)),
        ("? [a]\n: 1", DocumentProblem((), "has a key that is not plain text", 1)),
        ("a: &x [*x]", DocumentProblem(("a", 0), "contains itself through an alias", 1)),
        (
            "a: 1\n---\nb: 1",
            DocumentProblem((), "holds more than one YAML document (one file is one pipeline)", 2),
        ),
        ("a: \x07", DocumentProblem((), "holds a character that YAML does not allow")),
        ("[" * 5000, DocumentProblem((), "is nested too deeply")),
    ],
)
def test_problems(text: str, problem: DocumentProblem) -> None:
    """Each YAML mistake has one message with its line."""
    assert parse(text).problems == [problem]


def test_syntax_errors_have_line_and_column() -> None:
    """The message of a syntax error includes PyYAML's, with line and column."""
    (problem,) = parse("a:\n  b: [1, 2\nc: 3\n").problems

    assert problem.line == 3
    assert problem.text.startswith("is not valid YAML: while parsing a flow sequence")
    assert problem.text.endswith("(column 2)")


@pytest.mark.parametrize(
    "text", ["dsn: *geheim", "dsn: !geheim!x y", "dsn: @geheim", 'dsn: "geheim']
)
def test_syntax_errors_show_nothing_of_the_file(text: str) -> None:
    """A password that breaks the YAML is not repeated in the message."""
    (problem,) = parse(text).problems

    assert "geheim" not in problem.text


def test_paths_read_like_the_file() -> None:
    """Paths are formatted as people write them."""
    assert format_path(("spec", "sinks", 0, "config", "id")) == "spec.sinks[0].config.id"
    assert format_path(()) == ""


@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"#%@ \n\t,?0<")))
def test_any_text_is_parsed_or_has_a_problem(text: str) -> None:
    """The parser never fails: any text gives a value or a problem."""
    parse(text)


def test_a_tab_is_called_a_tab() -> None:
    """A tab in the indentation, the most common mistake, has a message that says how to fix it."""
    (problem,) = parse("metadata:\n\tname: orders\n").problems

    assert problem.line == 2
    assert problem.text.endswith("a tab stands before a key or value (indent with spaces)")
