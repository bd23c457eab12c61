"""Load pipeline files, and report all problems of a file at once, with line and path.

A file goes through five steps: expanding environment variables, parsing YAML, finding features that
this version lacks, validating against the models, and checking rules between blocks. Each step adds
its problems, and the file is loaded only if there are none. A problem reads `file:line:
path.in.document: what is wrong (what to do)`. Lines are those of the text after expansion: they
differ from the file's only if a variable's value has several lines.

A document without a file, such as one kept in the state store, goes through the same steps from the
third one on (`load_document`); its problems have a path and no line.

One invalid file never stops the others: `load_pipelines` returns it as a `BrokenPipeline`.

Processors that are only tried may also be in a file with nothing else (`load_processors`).
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltaforge_dagster.config.blocks import NAME, Block
from deltaforge_dagster.config.engine import DEFAULT_INSTANCE
from deltaforge_dagster.config.env import expand, expand_templates, unexpanded
from deltaforge_dagster.config.file.component import (
    OTHER_ATTRIBUTES,
    PIPELINE_ATTRIBUTES,
    attributes_of,
    component_documents,
)
from deltaforge_dagster.config.file.document import (
    Document,
    DocumentPath,
    DocumentProblem,
    format_path,
    parse,
    plain,
)
from deltaforge_dagster.config.file.ids import derive_ids, derive_processor_ids
from deltaforge_dagster.config.file.project import component_files, is_project, named_files
from deltaforge_dagster.config.file.rules import (
    advice,
    rules,
    take_unsupported,
    unquoted_nulls,
    without_effect,
)
from deltaforge_dagster.config.file.validation import validate
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.registry import source_types


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline file without problems.

    Attributes:
        path: The file; None for a pipeline that is kept in the state store.
        spec: Its effective content, defaults included.
        warnings: One line each, with file and line.
        hash: SHA-256 of the effective spec, with passwords masked: equal for files that do the
            same.
        in_code: Whether it has no file because a program's definitions contain it: it is what it is
            until they are loaded again.
    """

    path: Path | None
    spec: PipelineSpec
    warnings: tuple[str, ...]
    hash: str
    in_code: bool = False

    @property
    def name(self) -> str:
        """The pipeline's name, unique in a directory."""
        return self.spec.metadata.name

    @property
    def is_stored(self) -> bool:
        """Whether the state store keeps its document."""
        return self.path is None and not self.in_code


@dataclass(frozen=True, slots=True)
class BrokenPipeline:
    """A pipeline file with problems.

    Attributes:
        path: The file, or the first one if several files have the same name. None for a pipeline
            that is kept in the state store.
        name: `metadata.name` if it can be read, otherwise derived from the file's name. Unique
            among the pipelines that are loaded together.
        error: All problems.
        warnings: As in `LoadedPipeline`.
        gone: Whether the file does not exist any more.
        unset: Environment variables that it needs and this process does not have; another process
            may have them.
        in_code: As in `LoadedPipeline`.
    """

    path: Path | None
    name: str
    error: SpecError
    warnings: tuple[str, ...] = ()
    gone: bool = False
    unset: tuple[str, ...] = ()
    in_code: bool = False


@dataclass(slots=True)
class _PipelineFile:
    """A file, or a document without one, while it is read."""

    path: Path | None
    strict: bool = False
    folder: Path | None = None
    document: Document = field(default_factory=Document)
    name: str | None = None
    spec: PipelineSpec | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unset: tuple[str, ...] = ()

    def add(self, problems: Iterable[DocumentProblem]) -> None:
        self.problems += [self._line(problem) for problem in problems]

    def warn(self, warnings: Iterable[DocumentProblem]) -> None:
        self.warnings += [self._line(warning) for warning in warnings]

    def _line(self, problem: DocumentProblem) -> str:
        where = f"{format_path(problem.path)}: " if problem.path else ""
        if self.path is None:
            return f"{where}{problem.text}"
        line = problem.line or self.document.line(problem.path)
        return f"{self.path}:{line}: {where}{problem.text}"


def load_pipeline(path: Path, *, strict: bool = False) -> LoadedPipeline:
    """Return the pipeline of one file; with `strict` unknown fields are problems, not warnings.

    Raises:
        SpecError: With every problem of the file.
    """
    text, file = _text(path, strict=strict)
    if text is not None:
        file = _read(file, text)
    pipeline = _outcome(file, file.name or path.stem)
    if isinstance(pipeline, BrokenPipeline):
        raise pipeline.error
    return pipeline


def load_document(
    name: str, value: Mapping[str, Any], *, strict: bool = False
) -> LoadedPipeline | BrokenPipeline:
    """Return the pipeline of a document without a file, given as plain JSON values.

    Environment variables are not expanded, because the author of such a document need not know
    those of this machine. A reference to a variable is a problem in a field that needs a value, and
    a warning elsewhere.

    Args:
        name: The name of a broken pipeline whose document has none.
        value: The document.
        strict: Unknown fields are problems, not warnings.
    """
    file = _PipelineFile(None, strict)
    file.document.value = plain(value)
    _build(file, file.document.value)
    return _outcome(file, file.name or name)


def load_pipelines(path: Path, *, strict: bool = False) -> list[LoadedPipeline | BrokenPipeline]:
    """Return the pipelines of a file, or of all files below a directory, which may be empty.

    With `strict` unknown fields are problems, not warnings.

    Raises:
        SpecError: There is nothing at `path`.
    """
    return load_files(pipeline_files(path), strict=strict)


def pipeline_files(path: Path) -> list[Path]:
    """Return `path` itself, or every `*.yaml` and `*.yml` below it, sorted.

    Of a Dagster project, at `path` or below it, they are the component files, and the files that
    these name.

    Names that start with a dot are skipped: editors and mounted volumes keep copies under such
    names.

    Raises:
        SpecError: There is nothing at `path`.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SpecError(f"{path}: does not exist (name a pipeline file, or a directory of them)")
    files: list[Path] = []
    for folder, folders, names in os.walk(path):
        if is_project(Path(folder)):
            files += named_files(component_files(Path(folder)))
            folders.clear()  # the other YAML files in a project are no pipelines
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith((".yaml", ".yml")) and not name.startswith(".")
        ]
    return sorted(files)


def load_files(
    paths: Iterable[Path], *, strict: bool = False
) -> list[LoadedPipeline | BrokenPipeline]:
    """Return the pipelines of these files, in the same order, with unique names.

    Files with the same name become one broken pipeline. With `strict` unknown fields are problems,
    not warnings.
    """
    files = [file for path in named_files(paths) for file in _read_all(path, strict=strict)]
    claims: dict[str, list[_PipelineFile]] = {}
    for file in files:
        if file.name is not None:
            claims.setdefault(file.name, []).append(file)
    pipelines = []
    taken = set(claims)
    for file in files:
        if file.name is None:
            assert file.path is not None
            name = _free_name(file.path, taken)
            taken.add(name)
            pipelines.append(_outcome(file, name))
        elif claims[file.name][0] is file:
            _report_rivals(claims[file.name])
            pipelines.append(_outcome(file, file.name))
    return pipelines


def _report_rivals(files: list[_PipelineFile]) -> None:
    """Report the conflict of files with the same name, and collect all problems in the first."""
    first, *others = files
    for other in others:
        for file, rival in ((first, other), (other, first)):
            text = f"the name {file.name} is also used by {rival.path} (names must be unique)"
            file.add([DocumentProblem(("metadata", "name"), text)])
        first.problems += other.problems
        first.warnings += other.warnings


def _free_name(path: Path, taken: set[str]) -> str:
    """Return a free name for a file whose own name cannot be read."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:90] or "pipeline"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _outcome(file: _PipelineFile, name: str) -> LoadedPipeline | BrokenPipeline:
    warnings = tuple(file.warnings)
    if file.problems or file.spec is None:
        problem = SpecError(*file.problems)
        return BrokenPipeline(file.path, name, problem, warnings, unset=file.unset)
    return LoadedPipeline(file.path, file.spec, warnings, spec_hash(file.spec))


def spec_hash(spec: PipelineSpec) -> str:
    """Return the SHA-256 (hex) of the spec as canonical JSON: sorted keys, passwords masked.

    A digest of the salt of hashed columns is included, because a different salt produces different
    values.
    """
    text = json.dumps(spec.masked(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256((text + spec.spec.engine.columns.salt_digest()).encode()).hexdigest()


def load_component(path: Path, line: int) -> LoadedPipeline | BrokenPipeline:
    """Return the pipeline that is written in one document of a component file.

    Unknown fields are problems.

    Args:
        path: The component file.
        line: Where the document begins; a file may have several.
    """
    text, file = _text(path, strict=True)
    if text is not None:
        for document in component_documents(text):
            if document.line(()) == line:
                file = _read_component(path, document)
                break
        else:
            file.problems.append(f"{path}:{line}: is no component any more (load it again)")
    return _outcome(file, file.name or path.parent.name)


def load_inline(
    name: str, value: Mapping[str, Any], folder: Path
) -> LoadedPipeline | BrokenPipeline:
    """Return a pipeline that a program or component gives as plain values, without a file.

    Unknown fields are problems. Environment variables may be named as `{{ env.NAME }}`.

    Args:
        name: The name of a broken pipeline whose document has none.
        value: The document, `metadata` and `spec`.
        folder: What relative paths are relative to.
    """
    file = _PipelineFile(None, strict=True, folder=folder)
    file.document.value = plain(value)
    _build_with_env(file)
    pipeline = _outcome(file, file.name or name)
    return replace(pipeline, in_code=True)


def _read_all(path: Path, *, strict: bool) -> list[_PipelineFile]:
    """Return the pipelines of a file: one, or as many as a component file has documents."""
    text, file = _text(path, strict=strict)
    if text is None:
        return [file]
    components = component_documents(text)
    if not components:
        return [_read(file, text)]
    return [
        _read_component(path, document)
        for document in components
        if "path" not in attributes_of(document).value  # that file is read by itself
    ]


def _text(path: Path, *, strict: bool) -> tuple[str | None, _PipelineFile]:
    """Return the text of a file, None with a problem if it cannot be read."""
    file = _PipelineFile(path, strict)
    try:
        return path.read_text("utf-8-sig"), file
    except OSError as error:
        file.problems.append(f"{path}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        file.problems.append(f"{path}: is not UTF-8 text (byte {error.start})")
    return None, file


def _read_component(path: Path, document: Document) -> _PipelineFile:
    file = _PipelineFile(path, strict=True, document=attributes_of(document))
    attributes = file.document.value
    names = (*PIPELINE_ATTRIBUTES, *OTHER_ATTRIBUTES)
    for name in attributes.keys() - names:
        close = difflib.get_close_matches(name, names, n=1)
        guess = f" (did you mean {close[0]}?)" if close else f" (known are {', '.join(names)})"
        file.add([DocumentProblem((name,), f"is not a known attribute{guess}")])
    file.add(file.document.problems)
    file.document.value = {n: attributes[n] for n in PIPELINE_ATTRIBUTES if n in attributes}
    _build_with_env(file)
    return file


def _build_with_env(file: _PipelineFile) -> None:
    """Build a pipeline from a document in which variables are named as `{{ env.NAME }}`."""
    unset: dict[str, DocumentPath] = {}
    _build(file, _expanded(file.document.value, (), unset))
    file.add(
        DocumentProblem(path, f"the environment variable {name} is not set")
        for name, path in unset.items()
        if not any(f"variable {name}," in problem for problem in file.problems)
    )
    file.unset = tuple(sorted(unset))


def _expanded(value: Any, path: DocumentPath, unset: dict[str, DocumentPath]) -> Any:
    """Return a value with the variables' values in its texts.

    Args:
        value: Dicts, tuples and scalars.
        path: Where it is.
        unset: Gets the names of variables that are not set, each with where it is needed first.
    """
    if isinstance(value, dict):
        return {key: _expanded(child, (*path, key), unset) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_expanded(child, (*path, n), unset) for n, child in enumerate(value))
    if not isinstance(value, str):
        return value

    def missing(name: str) -> None:
        unset.setdefault(name, path)

    return expand_templates(value, os.environ, missing)


def _read(file: _PipelineFile, text: str) -> _PipelineFile:
    text, notes = expand(text, os.environ)
    file.add(DocumentProblem((), note.text, note.line) for note in notes if note.fatal)
    if file.problems:
        return file
    file.document = parse(text)
    file.add(file.document.problems)
    file.add(unquoted_nulls(file.document))
    _build(file, file.document.value)
    named = set(re.findall(r"\w+", " ".join(file.problems)))
    used = (note.name for note in notes if note.name in named)
    file.unset = tuple(sorted({name for name in used if name not in os.environ}))
    file.warn(DocumentProblem((), note.text, note.line) for note in notes if note.name not in named)
    return file


def _build(file: _PipelineFile, value: Any) -> None:
    """Fill `file` from the document's value, which is modified on the way."""
    if not isinstance(value, dict):
        if not file.problems:
            file.add([DocumentProblem((), "must be a mapping with `metadata` and `spec`", 1)])
        return
    file.name = _readable_name(value)
    variables = (
        {}
        if file.path or file.folder
        else {problem.path: problem for problem in _unexpanded(value)}
    )
    unsupported = take_unsupported(value)
    file.add(unsupported)
    file.name = _name_of_instance(value, file.name)
    file.warn(derive_ids(value, _readable_name(value)))
    file.add(_resolve_paths(value, file.folder if file.path is None else file.path.parent))
    file.warn(_warnings_of_source(value))
    file.warn(without_effect(value))
    covered = [problem.path[:-1] for problem in unsupported if problem.path[-1] == "type"]
    spec, unknown, problems = validate(PipelineSpec, value)
    if file.strict:
        file.add(unknown)
    else:
        file.warn(replace(problem, text=_ignored(problem.text)) for problem in unknown)
    waiting = {p.path for p in problems if "environment variable" in p.text} & variables.keys()
    problems = [variables[p.path] if p.path in waiting else p for p in problems]
    file.warn(problem for path, problem in variables.items() if path not in waiting)
    file.add(p for p in problems if not any(p.path[: len(c)] == c for c in covered))
    file.add(rules(value))
    if spec is not None:
        file.warn(advice(spec))
    file.spec = spec


def _unexpanded(value: Any, path: DocumentPath = ()) -> Iterator[DocumentProblem]:
    """Yield a problem for each environment variable in a document; only files may use them."""
    if isinstance(value, str):
        for name in unexpanded(value)[:1]:
            text = (
                f"holds ${{{name}}}, which stays as it is: environment variables are expanded"
                " in pipeline files only, not in what is sent to the API (write the value out)"
            )
            yield DocumentProblem(path, text)
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _unexpanded(child, (*path, key))
    elif isinstance(value, tuple):
        for index, child in enumerate(value):
            yield from _unexpanded(child, (*path, index))


def _ignored(text: str) -> str:
    """Turn the text of a problem with an unknown field into that of a warning."""
    return text.replace("known field", "known field, it is ignored", 1)


def _readable_name(value: Mapping[str, Any]) -> str | None:
    metadata = value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def _name_of_instance(value: Mapping[str, Any], name: str | None) -> str | None:
    """Append the instance id, if any, to the name, also in the document; return the name."""
    try:
        instance = value["spec"]["engine"]["checkpoint"]["instance_id"]
    except (KeyError, TypeError):
        return name
    valid = isinstance(instance, str) and NAME.fullmatch(instance)
    if name is None or not valid or instance == DEFAULT_INSTANCE:
        return name
    value["metadata"]["name"] = f"{name}.{instance}"
    return _readable_name(value)


def _resolve_paths(value: Mapping[str, Any], folder: Path | None) -> Iterator[DocumentProblem]:
    """Make the directories of Python processors absolute; in the file they are relative to it."""
    spec = value.get("spec")
    processors = spec.get("processors") if isinstance(spec, dict) else None
    for index, block in enumerate(processors if isinstance(processors, tuple) else ()):
        path = (
            block.get("path") if isinstance(block, dict) and block.get("type") == "python" else None
        )
        if not isinstance(path, str):
            continue
        if folder is None and not Path(path).is_absolute():
            document_path: DocumentPath = ("spec", "processors", index, "path")
            yield DocumentProblem(
                document_path, "must be absolute: there is no file that it could be relative to"
            )
        else:
            block["path"] = str(((folder or Path()) / path).resolve())


def _warnings_of_source(value: Mapping[str, Any]) -> Iterator[DocumentProblem]:
    try:
        source = value["spec"]["source"]
        kind, config = source_types().get(source["type"]), source["config"]
    except (KeyError, TypeError):
        return  # the models report what is wrong
    if kind is not None and isinstance(config, dict):
        for field, text in kind.warnings(config):
            yield DocumentProblem(("spec", "source", "config", field), text)


class _ProcessorFile(Block):
    """`processors` alone, as in `spec` of a pipeline file."""

    processors: tuple[Processor, ...]
    """The processors, in order."""


def load_processors(path: Path) -> tuple[Processor, ...]:
    """Return the processors of a pipeline file, or of a file with `processors` alone.

    Raises:
        SpecError: The file has problems; the error lists all of them.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise SpecError(f"{path}: cannot be read as UTF-8 text") from None
    document = parse(expand(text, os.environ)[0])
    value = document.value
    if isinstance(value, dict) and "spec" in value:
        return load_pipeline(path).spec.spec.processors
    problems = document.problems
    if not isinstance(value, dict):
        problems = problems or [DocumentProblem((), "must be a mapping with `processors`", 1)]
    else:
        blocks = value.get("processors")
        if isinstance(blocks, tuple):
            derive_processor_ids(blocks, ("processors",))
        parsed, unknown, wrong = validate(_ProcessorFile, value)
        problems = [*problems, *unknown, *wrong]
        if parsed is not None and not problems:
            problems = _repeated(parsed.processors)
            if not problems:
                return parsed.processors
    raise SpecError(
        *(
            f"{path}:{problem.line or document.line(problem.path)}: "
            f"{format_path(problem.path)}{': ' if problem.path else ''}{problem.text}"
            for problem in problems
        )
    )


def _repeated(processors: tuple[Processor, ...]) -> list[DocumentProblem]:
    seen: set[str] = set()
    problems = []
    for number, processor in enumerate(processors):
        if processor.id in seen:
            problems.append(
                DocumentProblem(("processors", number, "id"), f"{processor.id} is used twice")
            )
        seen.add(processor.id)
    return problems
