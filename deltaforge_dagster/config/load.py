"""From files to pipelines: every problem of a file at once, each with its line and its place.

A file goes through five steps: environment variables, YAML, features this version lacks, the models,
rules between blocks. Each step adds its problems, and the file is loaded only without any. A problem reads
`file:line: path.in.document: what is wrong (what to do)`. Lines are those of the text after
expansion: they differ from the file's only if a variable holds several lines.

One bad file never stops the others: `load_pipelines` returns it as a `BrokenPipeline`.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from deltaforge_dagster.config.document import (
    Document,
    DocumentPath,
    Problem,
    format_path,
    parse,
)
from deltaforge_dagster.config.dsn import postgres_dsn
from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.fields import field_names
from deltaforge_dagster.config.model import NAME, PipelineSpec
from deltaforge_dagster.config.sentences import sentence
from deltaforge_dagster.config.support import take_unsupported, without_effect
from deltaforge_dagster.errors import SpecError


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline file without problems.

    Attributes:
        path: The file.
        spec: Its effective content.
        warnings: What a person should know, one line each, with file and line.
        hash: SHA-256 over the effective spec, passwords masked: equal for files that do the same.
    """

    path: Path
    spec: PipelineSpec
    warnings: tuple[str, ...]
    hash: str

    @property
    def name(self) -> str:
        """The pipeline's name, unique in a directory."""
        return self.spec.metadata.name


@dataclass(frozen=True, slots=True)
class BrokenPipeline:
    """A pipeline file with problems.

    Attributes:
        path: The file; the first of them when several claim one name.
        name: `metadata.name` where that can be read, else made from the file's name. No other
            pipeline of the same load has it.
        error: All problems.
        warnings: As in `LoadedPipeline`.
    """

    path: Path
    name: str
    error: SpecError
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _File:
    """A file while it is read."""

    path: Path
    document: Document = field(default_factory=Document)
    name: str | None = None
    spec: PipelineSpec | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems += [self._line(problem) for problem in problems]

    def warn(self, warnings: Iterable[Problem]) -> None:
        self.warnings += [self._line(warning) for warning in warnings]

    def _line(self, problem: Problem) -> str:
        line = problem.line or self.document.line(problem.path)
        where = f"{format_path(problem.path)}: " if problem.path else ""
        return f"{self.path}:{line}: {where}{problem.text}"


def load_pipeline(path: Path) -> LoadedPipeline:
    """Return the pipeline of one file.

    Raises:
        SpecError: With every problem of the file.
    """
    file = _read(path)
    pipeline = _outcome(file, file.name or path.stem)
    if isinstance(pipeline, BrokenPipeline):
        raise pipeline.error
    return pipeline


def load_pipelines(path: Path) -> list[LoadedPipeline | BrokenPipeline]:
    """Return the pipelines of a file, or of every file below a directory, which may have none.

    Raises:
        SpecError: There is nothing at `path`.
    """
    return load_files(pipeline_files(path))


def pipeline_files(path: Path) -> list[Path]:
    """Return `path` itself, or every `*.yaml` and `*.yml` below it, sorted.

    Names that start with a dot are left out: editors and mounted volumes keep copies there.

    Raises:
        SpecError: There is nothing at `path`.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SpecError(f"{path}: does not exist (name a pipeline file, or a directory of them)")
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(folder, name)
            for name in names
            if name.endswith((".yaml", ".yml")) and not name.startswith(".")
        ]
    return sorted(found)


def load_files(paths: Iterable[Path]) -> list[LoadedPipeline | BrokenPipeline]:
    """Return the pipelines of these files, in their order, with unique names.

    A name that several files claim makes one broken pipeline of them all.
    """
    files = [_read(path) for path in paths]
    claims: dict[str, list[_File]] = {}
    for file in files:
        if file.name is not None:
            claims.setdefault(file.name, []).append(file)
    pipelines = []
    taken = set(claims)
    for file in files:
        if file.name is None:
            name = _free_name(file.path, taken)
            taken.add(name)
            pipelines.append(_outcome(file, name))
        elif claims[file.name][0] is file:
            _report_rivals(claims[file.name])
            pipelines.append(_outcome(file, file.name))
    return pipelines


def _report_rivals(files: list[_File]) -> None:
    """Add to the first of several files with one name what is wrong with all of them."""
    first, *others = files
    for other in others:
        for file, rival in ((first, other), (other, first)):
            text = f"the name {file.name} is also used by {rival.path} (names must be unique)"
            file.add([Problem(("metadata", "name"), text)])
        first.problems += other.problems
        first.warnings += other.warnings


def _free_name(path: Path, taken: set[str]) -> str:
    """Return a name for a file that does not tell its own."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:90] or "pipeline"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _outcome(file: _File, name: str) -> LoadedPipeline | BrokenPipeline:
    warnings = tuple(file.warnings)
    if file.problems or file.spec is None:
        return BrokenPipeline(file.path, name, SpecError(*file.problems), warnings)
    return LoadedPipeline(file.path, file.spec, warnings, spec_hash(file.spec))


def spec_hash(spec: PipelineSpec) -> str:
    """Return the SHA-256 (hex) of the spec as canonical JSON: sorted keys, passwords masked."""
    text = json.dumps(spec.masked(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> _File:
    file = _File(path)
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        file.problems.append(f"{path}: cannot be read: {error.strerror}")
        return file
    except UnicodeDecodeError as error:
        file.problems.append(f"{path}: is not UTF-8 text (byte {error.start})")
        return file
    text, notes = expand(text, os.environ)
    file.document = parse(text)
    file.add(file.document.problems)
    _build(file, file.document.value)
    named = set(re.findall(r"\w+", " ".join(file.problems)))
    file.warn(Problem((), note.text, note.line) for note in notes if note.name not in named)
    return file


def _build(file: _File, value: Any) -> None:
    """Fill `file` from the document's value, which is taken apart on the way."""
    if not isinstance(value, dict):
        if not file.problems:
            file.add([Problem((), "must be a mapping with `metadata` and `spec`", 1)])
        return
    file.name = _readable_name(value)
    unsupported = take_unsupported(value)
    file.add(unsupported)
    file.warn(_derive_ids(value))
    file.warn(_ignored_dsn_keys(value))
    file.warn(without_effect(value))
    covered = [problem.path[:-1] for problem in unsupported if problem.path[-1] == "type"]
    spec, unknown, problems = _validate(value)
    file.warn(unknown)
    file.add(p for p in problems if not any(p.path[: len(c)] == c for c in covered))
    file.add(_rules(value))
    file.spec = spec


def _readable_name(value: Mapping[str, Any]) -> str | None:
    metadata = value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def _derive_ids(value: dict[str, Any]) -> Iterator[Problem]:
    """Give the source and the sinks the ids that the file leaves out."""
    name = _readable_name(value)
    spec = value.get("spec")
    if not isinstance(spec, dict):
        return
    source = spec.get("source")
    sinks = spec.get("sinks")
    blocks: list[tuple[DocumentPath, object, str | None]] = [(("spec", "source"), source, name)]
    for index, sink in enumerate(sinks if isinstance(sinks, tuple) else ()):
        kind = sink.get("type") if isinstance(sink, dict) else None
        derived = f"{kind}-{index}" if isinstance(kind, str) else None
        blocks.append((("spec", "sinks", index), sink, derived))
    for path, block, derived in blocks:
        config = block.get("config") if isinstance(block, dict) else None
        if derived and isinstance(config, dict) and "id" not in config:
            config["id"] = derived
            yield Problem((*path, "config", "id"), f"is missing, {derived} is used (give one)")


def _ignored_dsn_keys(value: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        dsn = value["spec"]["source"]["config"]["dsn"]
        _, ignored = postgres_dsn(dsn)
    except (KeyError, TypeError, AttributeError, SpecError):
        return  # the models say what is wrong
    path = ("spec", "source", "config", "dsn")
    for key in ignored:
        yield Problem(path, f"has the key {key}, which PostgreSQL does not know; it is ignored")


def _validate(
    value: dict[str, Any],
) -> tuple[PipelineSpec | None, list[Problem], list[Problem]]:
    """Return the spec, the unknown fields and the problems; unknown fields leave `value`."""
    unknown: list[Problem] = []
    spec, errors = _try(value)
    strangers = [error for error in errors if error["type"] == "extra_forbidden"]
    if strangers:
        for error in strangers:
            path = _document_path(error["loc"], value)
            unknown.append(Problem(path, f"is not a known field, it is ignored{_guess(path)}"))
        for stranger in unknown:
            _remove(value, stranger.path)
        spec, errors = _try(value)
    problems = [
        Problem(_document_path(error["loc"], value), sentence(error))
        for error in errors
        # Entries with problems of their own do not count as entries.
        if error["type"] != "too_short" or not _at(value, error["loc"])
    ]
    return spec, unknown, problems


def _try(value: dict[str, Any]) -> tuple[PipelineSpec | None, list[ErrorDetails]]:
    try:
        return PipelineSpec.model_validate(value), []
    except pydantic.ValidationError as error:
        return None, error.errors(include_url=False, include_input=False)


def _document_path(loc: tuple[str | int, ...], value: Any) -> DocumentPath:
    """Return a place in the file for a place in the models, which also names forms of a block."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(value, dict) and part not in value and value.get("type") == part:
            continue  # the form that `type` chose
        path.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(path)


def _at(value: Any, path: DocumentPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _guess(path: DocumentPath) -> str:
    block = re.sub(r"\[\d+\]", "[]", format_path(path[:-1]))
    close = difflib.get_close_matches(str(path[-1]), field_names(block), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _remove(value: Any, path: DocumentPath) -> None:
    del _at(value, path[:-1])[path[-1]]


def _rules(value: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong between blocks, as far as the blocks can be read."""
    spec = value.get("spec")
    sinks = spec.get("sinks") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(sinks, tuple):
        return
    seen: dict[str, int] = {}
    for index, sink in enumerate(sinks):
        config = sink.get("config") if isinstance(sink, dict) else None
        sink_id = config.get("id") if isinstance(config, dict) else None
        if isinstance(sink_id, str) and seen.setdefault(sink_id, index) != index:
            path = ("spec", "sinks", index, "config", "id")
            text = f"{sink_id} is also the id of spec.sinks[{seen[sink_id]}] (ids must be unique)"
            yield Problem(path, text)
    policy = spec.get("commit_policy")
    quorum = policy.get("quorum") if isinstance(policy, dict) else None
    if isinstance(quorum, int) and quorum > len(sinks):
        text = f"is {quorum}, but there are only {len(sinks)} sinks"
        yield Problem(("spec", "commit_policy", "quorum"), text)
