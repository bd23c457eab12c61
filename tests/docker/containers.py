"""Containers of the image, made by an engine that runs here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docker.compose import ROOT, Service

IMAGE_VARIABLE = "DELTAFORGE_TEST_IMAGE"
"""Names an image that is built already."""


class Engine:
    """Podman or Docker, whichever answers.

    Args:
        program: Its command.
    """

    def __init__(self, program: str) -> None:
        self._program = program

    def run(self, *words: str) -> str:
        """Return what the engine's command prints; fail the test with all it said otherwise."""
        ended = self.tried(*words)
        assert ended.returncode == 0, f"{words}: {ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def tried(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the engine's command."""
        command = [self._program, *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)

    def built(self) -> str:
        """Build the image from the sources and return its name."""
        name = os.environ.get(IMAGE_VARIABLE)
        if name is None:
            name = "deltaforge-dagster:tested"
            self.run("build", "--network", "host", "-f", "docker/Dockerfile", "-t", name, ".")
        return name


def found_engine() -> Engine:
    """Return the engine that answers, or skip the test and say why there is none."""
    reasons = []
    for program in ("podman", "docker"):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        engine = Engine(program)
        answer = engine.tried("info")
        if answer.returncode == 0:
            return engine
        reasons.append(f"{program}: {answer.stderr.strip() or answer.stdout.strip()}")
    pytest.skip(f"no container engine: {'; '.join(reasons)}")


class Containers:
    """Services of a compose file as containers on the host's network, so that any server is in reach.

    Args:
        engine: Who runs them.
        image: Their image.
        services: Of the compose file, by name.
        folder: Has `pipelines` and `workspace.yaml`; anybody may read them.
        places: What stands here for names and ports.
    """

    def __init__(
        self,
        engine: Engine,
        image: str,
        services: Mapping[str, Service],
        folder: Path,
        places: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._image = image
        self._services = services
        self._folder = folder
        self._places = places
        self._prefix = f"deltaforge-{uuid.uuid4().hex[:8]}"
        self._started: list[str] = []
        self._volumes: set[str] = set()

    def start(self, name: str, *options: str) -> None:
        """Start a service with its own command, settings, and volumes."""
        service = self._services[name]
        command = service.words(self._places)
        environment = service.here(self._places).items()
        self._engine.run(
            "run", "--detach", "--network", "host", "--name", self._name(name),
            *(word for key, value in environment for word in ("--env", f"{key}={value}")),
            *self._mounts(service), *options, self._image, *command,
        )  # fmt: skip
        self._started.append(name)

    def healthy(self, name: str) -> bool:
        """Run the service's own health check in its container."""
        self.must_run(name)
        command = self._services[name].check(self._places)
        return self._engine.tried("exec", self._name(name), *command).returncode == 0

    def execute(self, name: str, *command: str) -> str:
        """Run a command in a service's container and return what it prints."""
        return self._engine.run("exec", self._name(name), *command)

    def must_run(self, name: str) -> None:
        """Fail with the container's last lines unless it runs."""
        state = self._state(name)
        assert state["Running"], f"{name} ended with {state['ExitCode']}: {self.lines(name)}"

    def lines(self, name: str) -> str:
        """Return the last lines that a container wrote."""
        ended = self._engine.tried("logs", "--tail", "40", self._name(name))
        return ended.stdout + ended.stderr

    def stop(self, name: str, seconds: int) -> int:
        """Ask a service to end, by force after `seconds`, and return its exit code."""
        self._engine.run("stop", "--time", str(seconds), self._name(name))
        code: int = self._state(name)["ExitCode"]
        return code

    def remove(self) -> None:
        """Remove all containers and volumes."""
        for name in reversed(self._started):
            self._engine.run("rm", "--force", "--volumes", self._name(name))
        for volume in self._volumes:
            self._engine.run("volume", "rm", "--force", volume)

    def _name(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _state(self, name: str) -> dict[str, Any]:
        (one,) = json.loads(self._engine.run("inspect", self._name(name)))
        state: dict[str, Any] = one["State"]
        return state

    def _mounts(self, service: Service) -> list[str]:
        words = ["--volume", f"{self._folder / 'workspace.yaml'}:/opt/dagster/workspace.yaml:ro"]
        for volume in service.definition["volumes"]:
            source, _, rest = volume.partition(":")
            if source.startswith("."):
                source = str(self._folder / source)
            else:
                source = self._name(source)
                self._volumes.add(source)
            words += ["--volume", f"{source}:{rest}"]
        return words
