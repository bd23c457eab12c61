"""Find the pipelines of a Dagster project by reading its component files, without Dagster.

A project is a folder whose `pyproject.toml` has `tool.dg.project`. Its components are below the
folder `defs` of its package. What its Python code adds is not seen.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deltaforge_dagster.config.file.component import attributes_of, component_documents
from deltaforge_dagster.config.file.document import Document
from deltaforge_dagster.errors import SettingsError


def is_project(folder: Path) -> bool:
    """Return whether a folder is a Dagster project."""
    return _root_module(folder) is not None


def component_files(folder: Path) -> list[Path]:
    """Return the files of a project's components of ours, sorted; none if it is no project."""
    return [path for path, _ in _components(folder)]


def named_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files, and the pipeline files that component files among them name, each once."""
    files: dict[Path, None] = {}
    for path in paths:
        files[path] = None
        for document in _documents(path):
            named = attributes_of(document).value.get("path")
            if isinstance(named, str):
                target = Path(os.path.normpath(path.parent / named))
                files |= dict.fromkeys(_yaml_files(target))
    return list(files)


def project_installation(folder: Path) -> dict[str, str]:
    """Return what the components of a project say under `installation`.

    Raises:
        SettingsError: The folder is no project, or its components differ.
    """
    if not is_project(folder):
        raise SettingsError(
            f"{folder}: is no Dagster project (pyproject.toml with tool.dg.project)"
        )
    first: tuple[Path, dict[str, str]] | None = None
    for path, documents in _components(folder):
        for document in documents:
            installation = attributes_of(document).value.get("installation")
            named = installation if isinstance(installation, dict) else {}
            texts = {name: str(value) for name, value in named.items()}
            if first is not None and first[1] != texts:
                raise SettingsError(
                    f"{first[0]} and {path} have different `installation`: set DELTAFORGE_HOME and "
                    "the other variables to those of the one that is meant"
                )
            first = first or (path, texts)
    return {} if first is None else first[1]


def _components(folder: Path) -> Iterator[tuple[Path, list[Document]]]:
    root = _root_module(folder)
    if root is None:
        return
    package = Path(*root.split("."))
    for defs in (folder / "src" / package / "defs", folder / package / "defs"):
        for path in _yaml_files(defs):
            if documents := _documents(path):
                yield path, documents


def _root_module(folder: Path) -> str | None:
    try:
        tables: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        root = tables["tool"]["dg"]["project"]["root_module"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return root if isinstance(root, str) else None


def _documents(path: Path) -> list[Document]:
    try:
        return component_documents(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError):
        return []


def _yaml_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in {".yaml", ".yml"})
