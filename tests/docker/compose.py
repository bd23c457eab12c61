"""The compose files of `docker/`, read as Compose reads them, and their services started by hand.

Only what these files use is understood: files merged in order, `${NAME}`, `${NAME:?why}`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import yaml

from deltaforge_dagster.installation.process import ServerProcess

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::\?[^}]*)?\}")
_REPLACED = {"command", "entrypoint", "image"}
"""Of a service, what a later file sets whole; other lists grow, and mappings are merged."""


@dataclass(frozen=True)
class Service:
    """One service, with nothing left to be filled in."""

    name: str
    image: str
    command: list[str]
    environment: dict[str, str]
    definition: dict[str, Any]

    def here(self, places: Mapping[str, str]) -> dict[str, str]:
        """Return its variables, with what stands here for names, ports and folders of containers."""
        return {name: _here(value, places) for name, value in self.environment.items()}

    def words(self, places: Mapping[str, str]) -> list[str]:
        """Return its command, likewise; nothing when it is the image's."""
        return [_here(word, places) for word in self.command]

    def check(self, places: Mapping[str, str]) -> list[str]:
        """Return the command of its health check, likewise."""
        kind, *words = self.definition["healthcheck"]["test"]
        assert kind == "CMD"
        return [_here(word, places) for word in words]

    def start(
        self, folder: Path, places: Mapping[str, str], more: Mapping[str, str] | None = None
    ) -> ServerProcess:
        """Run its command in this machine's environment, below `folder`.

        Args:
            folder: Its working directory, made here.
            places: What stands here for the names, ports and folders of containers.
            more: Variables that belong to this machine.
        """
        folder.mkdir()
        program, *words = self.words(places)
        installed = Path(sys.executable).with_name(program)
        return ServerProcess(
            self.name,
            [str(installed), *words],
            directory=folder,
            environment={
                **os.environ,
                "PYTHONWARNINGS": "ignore",
                # Spark's scripts search it themselves, but not below a path with spaces.
                "SPARK_HOME": str(Path(pyspark.__file__).parent),
                **self.here(places),
                **(more or {}),
            },
        )


def image_command() -> list[str]:
    """Return what the image runs when it is told nothing: the code server."""
    (command,) = [
        line.removeprefix("CMD")
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("CMD")
    ]
    words: list[str] = json.loads(command)
    return words


def variables(*files: str) -> set[str]:
    """Return what the files take from the environment."""
    return {name for file in files for name in _VARIABLE.findall((DOCKER / file).read_text())}


def read(environment: Mapping[str, str], *files: str) -> dict[str, Any]:
    """Return the files' contents, one merged over the other."""
    merged: dict[str, Any] = {}
    for file in files:
        text = _VARIABLE.sub(lambda found: environment[found[1]], (DOCKER / file).read_text())
        merged = _merged(merged, yaml.safe_load(text))
    return merged


def services(environment: Mapping[str, str], *files: str) -> dict[str, Service]:
    """Return the services of the files."""
    found: dict[str, Any] = read(environment, *files)["services"]
    return {
        name: Service(
            name,
            one["image"],
            [*one.get("entrypoint", []), *one.get("command", [])],
            {key: str(value) for key, value in one.get("environment", {}).items()},
            one,
        )
        for name, one in found.items()
    }


def _merged(before: Any, after: Any, name: str = "") -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        both = {key: _merged(before[key], after[key], key) for key in before if key in after}
        return {**before, **after, **both}
    if isinstance(before, list) and isinstance(after, list) and name not in _REPLACED:
        return [*before, *after]
    return after


def _here(text: str, places: Mapping[str, str]) -> str:
    # In one pass: what stands for one place may hold the letters of another, as ports do.
    names = sorted(map(re.escape, places), key=len, reverse=True)
    return re.sub("|".join(names), lambda found: places[found[0]], text) if names else text
