"""Processors in whole files: how paths are resolved, and how invalid blocks are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.process.chains import chain_of
from tests.config.conftest import Write


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
