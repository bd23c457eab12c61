"""Which Java is taken, and what is said when none will do."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.java import find_java


def fake_java(home: Path, version: str) -> Path:
    """Make a Java that knows its version and nothing else."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide what the machine has."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/bin")
    monkeypatch.setattr(shutil, "which", lambda _: None)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)


def test_java_home_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`JAVA_HOME` comes before the path."""
    chosen = fake_java(tmp_path / "chosen", "17.0.9")
    other = fake_java(tmp_path / "other", "21")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    monkeypatch.setattr(shutil, "which", lambda _: str(other / "bin" / "java"))

    assert find_java() == chosen


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "24", "25.0.1"])
def test_other_java_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """A Java that is too old or too new does not hide a good one behind it."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "other", version)))
    good = fake_java(tmp_path / "good", "21.0.8")
    monkeypatch.setattr(shutil, "which", lambda _: str(good / "bin" / "java"))

    assert find_java() == good


def test_nothing_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names every Java that was looked at, and why not."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    old = fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setattr(shutil, "which", lambda _: str(old / "bin" / "java"))

    with pytest.raises(SettingsError) as caught:
        find_java()

    assert f"JAVA_HOME ({tmp_path}/gone) does not run" in str(caught.value)
    assert f"java on the path ({old}) is Java 11" in str(caught.value)


def test_nothing_at_all() -> None:
    """The error says that there is none, and two ways to get one."""
    with pytest.raises(SettingsError, match=r"JAVA_HOME, or run `pip install .*none was found"):
        find_java()
