"""Unknown fields in strict mode, and values that are not what they seem."""

import os
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import BrokenPipeline, load_pipeline, load_pipelines
from deltaforge_dagster.errors import SpecError
from tests.config.conftest import Write

MISSPELT = {"spec.source.config.start_positon": "latest", "spec.engine.zebra": "red"}


def problems(path: Path, *, strict: bool = False) -> list[str]:
    """Return the problems of a file, without its name."""
    with pytest.raises(SpecError) as caught:
        load_pipeline(path, strict=strict)
    return [one.removeprefix(f"{path}:") for one in caught.value.problems]


def test_unknown_fields_are_problems(write: Write) -> None:
    """In strict mode an unknown field is a problem, with a suggestion of a similar field."""
    path = write(MISSPELT)

    assert problems(path, strict=True) == [
        "14: spec.source.config.start_positon: is not a known field (did you mean start_position?)",
        "26: spec.engine.zebra: is not a known field",
    ]
    (broken,) = load_pipelines(path, strict=True)
    assert isinstance(broken, BrokenPipeline)
    assert len(load_pipeline(path).warnings) == 2


def test_a_known_file_stays_as_it_is(write: Write) -> None:
    """Strict mode changes nothing about a file without unknown fields, derived ids included."""
    path = write({"spec.sinks.0.config.id": None, "apiVersion": "deltaforge/v1"})

    assert load_pipeline(path, strict=True) == load_pipeline(path)


@pytest.mark.parametrize("name", ["empty_object", "empty_list"])
def test_null_without_quotes(write: Write, name: str) -> None:
    """YAML would swallow the unquoted word `null`, which has a meaning here; quoted, it is accepted."""
    path = write({"spec.processors": [{"type": "flatten", name: "x"}]})
    text = path.read_text()

    path.write_text(text.replace(f"{name}: x", f"{name}: null"))
    (problem,) = problems(path)
    assert problem.startswith(f"26: spec.processors[0].{name}: has no value (the word null needs")
    path.write_text(text.replace(f"{name}: x", f'{name}: "null"'))
    (flatten,) = load_pipeline(path).spec.spec.processors
    assert getattr(flatten, name) == "null"


def test_a_variable_that_is_no_text(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable whose bytes are not UTF-8 is reported by its name, not as a YAML error."""
    monkeypatch.setitem(os.environ, "ODD_VALUE", "a\udcff")
    path = write({"metadata.tenant": "${ODD_VALUE}"})

    assert problems(path) == [
        "3: ${ODD_VALUE}: the environment variable ODD_VALUE is not UTF-8 text"
    ]


def test_the_four_ways_a_file_fails_before_its_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing file, an unreadable file, a variable and YAML each have a message, with the file's name."""
    monkeypatch.setitem(os.environ, "ODD_VALUE", "a\udcff")
    odd, torn, folder = tmp_path / "odd.yaml", tmp_path / "torn.yaml", tmp_path / "folder.yaml"
    odd.write_text("$ODD_VALUE")
    torn.write_text("metadata: {name: ")
    folder.mkdir()

    with pytest.raises(SpecError, match=r"none\.yaml: does not exist \(name a pipeline file"):
        load_pipelines(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match=r"folder\.yaml: cannot be read: Is a directory"):
        load_pipeline(folder)
    with pytest.raises(SpecError, match=r"odd\.yaml:1: .* variable ODD_VALUE is not UTF-8 text"):
        load_pipeline(odd)
    with pytest.raises(SpecError, match=r"torn\.yaml:1: is not valid YAML: "):
        load_pipeline(torn)
