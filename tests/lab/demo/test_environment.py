"""What the demo needs before its servers start, and what it compiles meanwhile."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SpecError
from deltaforge_lab.demo.environment import _KERNELS, DemoEnvironment, DemoSource


@pytest.fixture
def environ() -> Iterator[None]:
    """Undo what is done to the environment variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("source", _KERNELS)
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


@pytest.mark.parametrize("source", _KERNELS)
def test_kernels_that_are_named_can_be_compiled(source: str) -> None:
    """The demo names modules; each of them is there and compiles its kernels."""
    modules = [name for names in _KERNELS[source].values() for name in names]  # type: ignore[index]

    assert all(callable(importlib.import_module(name).warm) for name in modules)


@pytest.mark.parametrize(
    ("module", "reported"),
    [
        ("deltaforge_dagster.processors.sql.spliced_fields", "the kernels for routes are compiled"),
        ("no_such_module", "the kernels for routes could not be compiled now"),
    ],
)
def test_what_is_said_of_compiled_kernels(tmp_path: Path, module: str, reported: str) -> None:
    """The demo says that kernels are compiled only if they are, and otherwise why not."""
    said: list[str] = []
    environment = DemoEnvironment(tmp_path, said.append)
    environment._report_kernels("routes", environment._compile_kernels([module]))

    assert said[0].startswith(reported)
    assert ("no_such_module" in said[0]) == (module == "no_such_module")
