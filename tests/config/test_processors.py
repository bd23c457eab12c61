"""Processors in whole files: how paths are resolved, and how invalid blocks and SQL expressions are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.processors import (
    PythonProcessor,
    expression_problem,
    expression_words,
)
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.process.chains import chain_of
from tests.config.conftest import Write


@pytest.mark.parametrize(
    "text",
    [
        "after:total::decimal(20, 2) > 1",
        "after:select.from = 'drop table x; -- no comment'",
        "extract(year from timestamp_micros(ts_us)) = 2026 -- a comment (",
        "table in ('a', 'b') and (table is not null) /* ( */",
        "`over` || r'\\' || \"it's\"",
        "trim(both ' ' from after:name::string)",
        "set = 1",
    ],
)
def test_what_may_be_an_expression(text: str) -> None:
    """Quotes, comments, paths and names that look like queries are accepted."""
    assert expression_problem(text) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" -- nothing", "is empty"),
        ("after:name = 'x", "has an unclosed '"),
        ("`a", "has an unclosed `"),
        ("1 /* a", "has an unclosed /*"),
        ("f(a", "has an unclosed ("),
        ("f(a])", "has ] without an opening bracket"),
        ("1; 2", "contains `;` (only one expression is allowed)"),
        ("drop table x", "is a statement (drop), not an expression"),
        ("a in (SELECT 1)", "holds a subquery (SELECT), but only the row itself can be read"),
        ("(from x)", "holds a subquery (from), but only the row itself can be read"),
        ("exists((table x))", "holds a subquery (table), but only the row itself can be read"),
        ("a in (values 1)", "holds a subquery (values), but only the row itself can be read"),
        ("sum(1) over ()", "holds a window function (over), but only the row itself can be read"),
    ],
)
def test_what_can_be_none(text: str, said: str) -> None:
    """Unclosed text, and whatever reads more than one row or does more than compute, is rejected with the reason."""
    assert expression_problem(text) == said


def test_words() -> None:
    """Every name that may be a column is found, whatever its case and quotes, but not in strings."""
    assert expression_words("After:x > `ts_us` and 'before' <> /* key */ OP") == {
        "after", "x", "ts_us", "and", "op"
    }  # fmt: skip


def test_a_path_is_relative_to_the_file(write: Write, tmp_path: Path) -> None:
    """The function is searched next to the file, whatever the working directory."""
    path = write(
        {"spec.processors": [{"type": "python", "function": "clean_orders:f", "path": "code"}]},
        file="folder/orders.yaml",
    )
    path.parent.joinpath("code").mkdir()
    path.parent.joinpath("code", "clean_orders.py").write_text("def f(table): return table\n")

    spec = load_pipeline(path).spec

    (one,) = spec.spec.processors
    assert isinstance(one, PythonProcessor)
    assert one.path == str(tmp_path / "folder" / "code")
    assert list(chain_of(spec).problems()) == []


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "sql", "where": "a in (select 1)"}, "spec.processors[0].where: holds a subquery (select), but only the row itself can be read"),
        ({"type": "sql", "set": {"after.x": "f("}}, "spec.processors[0].set.after.x: has an unclosed ("),
        ({"type": "python", "function": "clean"}, "spec.processors[0].function: must be `module:function`"),
        ({"type": "sqll"}, "spec.processors[0].type: is sqll, which no installed package provides; known are javascript"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_place(write: Write, block: dict[str, Any], said: str) -> None:
    """A problem names the field of the file, as everywhere."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(write({"spec.processors": [block]}))

    (problem,) = caught.value.problems
    assert said in problem
