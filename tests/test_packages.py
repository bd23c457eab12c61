"""What packages and modules say of themselves: the map by which one finds things."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import deltaforge_dagster
import deltaforge_lab

ROOT = Path(deltaforge_dagster.__file__).parent
LAB = Path(deltaforge_lab.__file__).parent
FILES = {
    path.relative_to(root): ast.get_docstring(ast.parse(path.read_text())) or ""
    for root in (LAB.parent, ROOT)
    for path in (LAB if root == LAB.parent else ROOT).rglob("*.py")
}
NAMES = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES}


def test_modules_that_a_package_names_are_there() -> None:
    """A plain word between backticks in a package's docstring is a module of it, or of the root."""
    missing = {
        f"{path.parent}: {name}"
        for path, text in FILES.items()
        if path.name == "__init__.py"
        for name in re.findall(r"`([a-z][a-z0-9_]*(?:\.[a-z_]+)?)`", text)
        if not {name, ".".join([*path.parent.parts, name])} & NAMES
    }

    # The command, and a field of Alembic's.
    assert missing == {"cli: deltaforge", "state/database/migrations: down_revision"}


def test_the_guided_tour_names_files() -> None:
    """Each stop of the tour in docs/architecture.md is a file, and there are few enough to read them all."""
    text = (LAB.parent / "docs" / "architecture.md").read_text()
    stops = re.findall(r"^[0-9]+\. `([^`]+)`:", text, re.MULTILINE)

    assert [stop for stop in stops if not (ROOT / stop).is_file()] == []
    assert 20 < len(stops) <= 32


def test_every_module_teaches_itself() -> None:
    """A module begins with a line that says what it is."""
    silent = {str(path) for path, text in FILES.items() if len(text.partition("\n")[0]) < 10}

    assert silent == set()


def test_a_class_name_means_one_class() -> None:
    """No two classes of the product and the lab share a name, so a name says enough without its import."""
    counts = Counter(
        node.name
        for root in (ROOT, LAB)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )

    assert {name for name, count in counts.items() if count > 1} == set()


def test_threads_of_a_run_log_its_name() -> None:
    """Each thread that the engine starts has the fields of the run's log lines (`config.logs.in_context`)."""
    without = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "pipeline").rglob("*.py")
        if len(re.findall(r"threading\.Thread\(", text := path.read_text()))
        != len(re.findall(r"target=in_context\(", text))
    }

    assert without == set()
