import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.files.validate import validate
from tests.config.conftest import Write, write

__all__ = ["write"]


def run(*arguments: object) -> Result:
    """Run the command alone, as `deltaforge validate` does."""
    app = typer.Typer()
    app.command()(validate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_good_files_are_named(write: Write) -> None:
    """A valid file has exit code 0 and one line that describes it."""
    path = write()

    result = run(path)

    assert result.exit_code == 0
    assert result.output == f"ok      {path}: pipeline orders, postgres to cache, lines\n"


def test_without_files_those_of_the_installation_are_checked(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without arguments the installation's files are checked."""
    path = write()
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))

    assert run().output == f"ok      {path}: pipeline orders, postgres to cache, lines\n"


def test_every_problem_and_warning_is_printed(write: Write, tmp_path: Path) -> None:
    """The problems of all files are printed, including brackets, and the exit code is 1."""
    good = write({"metadata.name": "good", "spec.colour": "red"}, file="a.yaml")
    bad = write({"spec.sinks.0.config.uri": "geheim", "metadata.tenant": None}, file="b.yaml")

    result = run(tmp_path)

    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"warning {good}:24: spec.colour: is not a known field, it is ignored",
        f"ok      {good}: pipeline good, postgres to cache, lines",
        f"error   {bad}:1: metadata.tenant: is required",
        (
            f"error   {bad}:17: spec.sinks[0].config.uri: is not a Redis address (write "
            "redis://user:password@host:port/database, or rediss:// for TLS, unix://, "
            "redis+sentinel:// or redis+cluster://, with special characters of the password percent-encoded)"
        ),
    ]


def test_missing_files_are_problems(tmp_path: Path, write: Write) -> None:
    """A path without pipeline files fails the command, and the other files are still checked."""
    path = write()
    (tmp_path / "empty").mkdir()

    result = run(tmp_path / "none", tmp_path / "empty", path)

    assert result.exit_code == 1
    assert f"error   {tmp_path}/none: does not exist" in result.output
    assert f"error   {tmp_path}/empty: holds no *.yaml or *.yml file" in result.output
    assert f"ok      {path}" in result.output


def test_names_are_unique_across_arguments(write: Write) -> None:
    """Two files with the same name are an error, even if given as separate arguments."""
    assert run(write(file="a.yaml"), write(file="b/b.yaml")).exit_code == 1


def test_a_copy_under_another_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both files name and cannot share is an error of both, with both files; also if only one is given."""
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    first, copy = write(file="a.yaml"), write({"metadata.name": "copy"}, file="b.yaml")
    said = [
        f"error   {first}: spec.source.config.slot: replication slot 'orders' is used by pipeline copy ({copy}) as well,",
        f"error   {copy}: spec.source.config.slot: replication slot 'orders' is used by pipeline orders ({first}) as well,",
    ]

    both, one = run(tmp_path), run(copy)

    assert (both.exit_code, one.exit_code) == (1, 1)
    assert [line.partition(" and two")[0] for line in both.output.splitlines()] == said
    assert [line.partition(" and two")[0] for line in one.output.splitlines()] == said[1:]


def test_a_file_given_twice_is_one(write: Write, tmp_path: Path) -> None:
    """A file that a directory argument already covers is not a duplicate."""
    assert run(write(), tmp_path).exit_code == 0


@pytest.mark.parametrize("tenant", ["acme", None])
def test_json(write: Write, tenant: str | None) -> None:
    """With `--json` the output is one JSON object."""
    path = write({"metadata.tenant": tenant, "spec.colour": "red"})

    result = run("--json", path)

    valid = tenant is not None
    assert result.exit_code == (0 if valid else 1)
    assert json.loads(result.output) == {
        "valid": valid,
        "problems": [],
        "pipelines": [
            {
                "path": str(path),
                "name": "orders",
                "valid": valid,
                "problems": [] if valid else [f"{path}:1: metadata.tenant: is required"],
                "warnings": [
                    f"{path}:{24 if valid else 23}: spec.colour: is not a known field, it is ignored"
                ],
            }
        ],
    }


@pytest.mark.parametrize("exactly_once", [False, True])
def test_the_librarys_own_settings_are_read(write: Write, exactly_once: bool) -> None:
    """Settings that librdkafka refuses are reported without their values; files that they name need not exist."""

    def kafka(**conf: str) -> Path:
        sink = {"id": "out", "brokers": "localhost:1", "topic": "t", "exactly_once": exactly_once}
        names = {name.replace("_", "."): value for name, value in conf.items()}
        config = {**sink, "client_conf": names}
        return write({"spec.sinks": [{"type": "kafka", "config": config}]})

    good = run(kafka(linger_ms="7", security_protocol="SSL", ssl_ca_location="/not/here.pem"))
    assert good.exit_code == 0, good.output
    for conf, said in (
        ({"liger_ms": "7"}, 'No such configuration property: "liger.ms"'),
        ({"security_protocol": "geheim"}, 'for configuration property "security.protocol"'),
    ):
        path = kafka(**conf)
        bad = run(path)
        assert bad.exit_code == 1
        assert bad.output.startswith(f"error   {path}: sink out: client_conf: ")
        assert said in bad.output
        assert "geheim" not in bad.output


def test_strict(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--strict`, or the installation's setting, makes an unknown field a problem."""
    path = write({"spec.enginee": {}})
    said = f"{path}:24: spec.enginee: is not a known field"

    assert run(path).output.startswith(f"warning {said}, it is ignored (did you mean engine?)\n")
    assert run("--strict", path).output == f"error   {said} (did you mean engine?)\n"
    assert run("--strict", path).exit_code == 1
    monkeypatch.setenv("DELTAFORGE_STRICT", "true")
    assert run(path).exit_code == 1
