"""What the demo needs before its servers start, and what it compiles meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SpecError
from deltaforge_lab.demo.environment import DemoEnvironment, DemoSource


@pytest.fixture
def environ() -> Iterator[None]:
    """Undo what is done to the environment variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("source", ["postgres", "turso"])
@pytest.mark.usefixtures("environ")
def test_the_files_of_the_demos_load(tmp_path: Path, source: DemoSource) -> None:
    """They are in the package itself, and need no server for it."""
    DemoEnvironment(tmp_path, print, source)._check_file()


@pytest.mark.usefixtures("environ")
def test_a_file_that_does_not_load_is_named_before_anything_starts(tmp_path: Path) -> None:
    """The demo fails with what is wrong with the file, and no server was started for it."""
    (tmp_path / "demo.yaml").write_text("../../examples/demo-turso.yaml")
    said: list[str] = []
    environment = DemoEnvironment(tmp_path, said.append)
    environment._file = tmp_path / "demo.yaml"

    with pytest.raises(SpecError, match=r"demo\.yaml"), environment:
        pass

    assert said == []


@pytest.mark.parametrize(
    ("file", "reported"),
    [
        (None, "the kernels for messages are compiled"),
        ("no-such-file.yaml", "the kernels for messages could not be compiled now"),
    ],
)
@pytest.mark.usefixtures("environ")
def test_what_is_said_of_compiled_kernels(tmp_path: Path, file: str | None, reported: str) -> None:
    """The demo says that kernels are compiled only if they are, and otherwise why not."""
    said: list[str] = []
    environment = DemoEnvironment(tmp_path, said.append)
    environment._check_file()
    environment._file = environment._file if file is None else tmp_path / file
    environment._report_kernels("messages", environment._compile_kernels("others"))

    assert said[0].startswith(reported)
    assert ("no-such-file" in said[0]) == (file is not None)
