"""How functions of pipeline files are found and reloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.processors import code as modules
from deltaforge_dagster.processors.code import line_in, loaded, source_hash


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore import path and modules after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(modules, "_first", [])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def write(folder: Path, **sources: str) -> str:
    """Write modules into a directory and return its path."""
    for name, source in sources.items():
        folder.joinpath(f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(f"{name}.py").write_text(source)
    return str(folder)


def test_a_changed_file_is_reloaded(tmp_path: Path) -> None:
    """The next processor gets the new source, even of modules beside it, and a different hash."""
    path = write(tmp_path, clean="import helper\ndef f(): return helper.x\n", helper="x = 1\n")
    first, before = loaded("clean:f", path)[0], source_hash("clean:f", path)
    write(tmp_path, clean="import helper\ndef f(): return helper.x * 10\n", helper="x = 22\n")

    second = loaded("clean:f", path)[0]

    assert (first(), second()) == (1, 220)
    assert source_hash("clean:f", path) != before


def test_directories_have_their_own_modules(tmp_path: Path) -> None:
    """Two pipelines may have modules with the same name, and helper modules with the same name."""
    one = write(
        tmp_path / "one", clean="import helper\ndef f(): return helper.x\n", helper="x = 1\n"
    )
    two = write(
        tmp_path / "two", clean="import helper\ndef f(): return helper.x\n", helper="x = 2\n"
    )

    assert [loaded("clean:f", path)[0]() for path in (one, two, one)] == [1, 2, 1]


def test_only_modules_of_the_directory_itself(tmp_path: Path) -> None:
    """Modules deeper in the directory, such as those of a virtual environment, are not reloaded."""
    write(tmp_path / "env", installed="")
    sys.path.append(str(tmp_path / "env"))
    path = write(tmp_path, clean="import installed\ndef f(): return installed\n")

    assert loaded("clean:f", path)[0]() is loaded("clean:f", path)[0]()


def test_modules_of_packages(tmp_path: Path) -> None:
    """A module with a dotted name is found, and hashed without loading it or its package."""
    path = write(tmp_path, **{"pack/__init__": "1 / 0\n", "pack/inner": "def f(): return 1\n"})

    assert source_hash("pack.inner:f", path) is not None
    with pytest.raises(
        SpecError, match=r"the module pack\.inner cannot be loaded: ZeroDivisionError"
    ):
        loaded("pack.inner:f", path)
    assert source_hash("no_such_module:f", path) is None
    assert source_hash("sys:exit", None) is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nosuch", "there is no module nosuch"),
        ("x = = 1", r"SyntaxError: invalid syntax \(line 1\)"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("f = 1", "the module clean has no function f"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, source: str, said: str) -> None:
    """The error has the reason and the module's line."""
    with pytest.raises(SpecError, match=said):
        loaded("clean:f", write(tmp_path, clean=source))


def test_the_line_of_an_error(tmp_path: Path) -> None:
    """The line is the last one in the user's module, not one of a library."""
    source = "import json\ndef f(): return g()\ndef g():\n    return json.loads('x')\n"
    function, file = loaded("clean:f", write(tmp_path, clean=source))

    with pytest.raises(ValueError, match="Expecting") as caught:
        function()

    assert line_in(caught.value, file) == 4
    assert line_in(caught.value, "elsewhere.py") is None
