"""Load processors in order to try them, from a pipeline file or a file with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from deltaforge_dagster.config.blocks import Block
from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.file.document import DocumentProblem, format_path, parse
from deltaforge_dagster.config.file.ids import derive_processor_ids
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.file.validation import validate
from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.errors import SpecError


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
