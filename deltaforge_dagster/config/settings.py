"""Settings of an installation, from environment variables.

=========================  =========================================  =======================
variable                   meaning                                    default
=========================  =========================================  =======================
DELTAFORGE_PIPELINES       a pipeline file, or a directory of them    ./pipelines
DELTAFORGE_HOME            state and journal of this machine          ./.deltaforge
DELTAFORGE_STATE_URL       `sqlite:///FILE`, `postgresql://...`,      SQLite in the home
                           or `memory` (one process only)
DELTAFORGE_JOURNAL_URL     a folder as URL, or a plain path           journal in the home
DELTAFORGE_STRICT          `true`: unknown fields of pipeline files   false
                           are errors, not warnings
DELTAFORGE_SPARK_REMOTE    `sc://host:port` of a Spark Connect        its own local server
                           server
DELTAFORGE_LAKE_JARS       folder for the jars that sinks of tables   `jars` in the home
                           need (`deltaforge lake install`)
DELTAFORGE_API_TOKEN       bearer token of the REST API               none: this machine only
DELTAFORGE_DAGSTER_URL     webserver that is asked to reload when     that of `dev`
                           pipelines change                           and `demo`
DELTAFORGE_LOG             filter of logs (`config.logs`)             `info`
DELTAFORGE_LOG_FORMAT      `json` or `text`                           `text` on a terminal
=========================  =========================================  =======================

The variables of the API and of the logs are read by their modules. Settings of a single pipeline
are in its file. A project sets those of where things are in its components (`project_settings`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from deltaforge_dagster.config.env import expand_templates
from deltaforge_dagster.config.secrets import check_encoded
from deltaforge_dagster.errors import SettingsError, SpecError


@dataclass(frozen=True, slots=True)
class Settings:
    """Where an installation keeps its data. URLs may contain passwords and are not in the repr.

    Attributes:
        pipelines: A pipeline file or a directory.
        home: Directory for state, journal and caches; absolute.
        state_url: SQLAlchemy URL of the state store, or `memory`.
        journal_url: fsspec URL of the journal's folder.
        spark_remote: Spark Connect URL; None to start a local server.
        lake_jars: Folder of the jars with which the local server writes Delta and Iceberg tables;
            absolute.
        strict: Whether unknown fields of pipeline files are errors.
        dagster_url: Dagster's webserver, which is asked to reload when pipeline files change.
    """

    pipelines: Path
    home: Path
    state_url: str = field(repr=False)
    journal_url: str = field(repr=False)
    spark_remote: str | None = field(repr=False)
    lake_jars: Path
    strict: bool = False
    dagster_url: str | None = None

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the settings of this process; an empty variable counts as unset.

        Raises:
            SettingsError: A variable is invalid; the message contains its name but not its value.
        """

        def get(name: str) -> str | None:
            return environment.get(f"DELTAFORGE_{name}", "").strip() or None

        home = _absolute(get("HOME") or ".deltaforge")
        remote = get("SPARK_REMOTE")
        if remote is not None and not remote.startswith("sc://"):
            raise SettingsError("DELTAFORGE_SPARK_REMOTE must start with sc:// (Spark Connect)")
        return cls(
            pipelines=_absolute(get("PIPELINES") or "pipelines"),
            home=home,
            state_url=_state_url(get("STATE_URL") or f"sqlite:///{home}/state.db"),
            journal_url=_journal_url(get("JOURNAL_URL") or str(home / "journal")),
            spark_remote=remote,
            lake_jars=_absolute(get("LAKE_JARS") or str(home / "jars")),
            strict=_flag("STRICT", get("STRICT")),
            dagster_url=get("DAGSTER_URL"),
        )


INSTALLATION_FIELDS = ("home", "state_url", "journal_url", "spark_remote", "lake_jars")
"""What a project may set: each is the variable `DELTAFORGE_...` of that name, in lower case."""


def project_settings(
    installation: Mapping[str, str], folder: Path, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings of pipelines in a project (`project_environment`)."""
    return Settings.from_env(project_environment(installation, folder, environment))


def project_environment(
    installation: Mapping[str, str], folder: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of an installation in a project; those of the environment win.

    Args:
        installation: Values of `INSTALLATION_FIELDS`, in which `{{ env.NAME }}` is a variable.
        folder: The project's folder, to which relative paths are relative, and which has the home
            if nothing says where it is.
        environment: The variables.

    Raises:
        SettingsError: A value is invalid, or a variable that one refers to is not set; the message
            does not contain the value.
    """
    unset: list[str] = []
    own = {"home": ".deltaforge", **installation}
    values = {name: expand_templates(text, environment, unset.append) for name, text in own.items()}
    if unset:
        raise SettingsError(
            f"installation: the environment variable {unset[0]} is not set in this process"
        )
    for name in ("home", "lake_jars"):
        if name in values:
            values[name] = str(folder / Path(values[name]).expanduser())
    if "journal_url" in values and "://" not in values["journal_url"]:
        values["journal_url"] = str(folder / Path(values["journal_url"]).expanduser())
    if (state := values.get("state_url", "")).startswith("sqlite:///"):
        file = Path(state.removeprefix("sqlite:///")).expanduser()
        values["state_url"] = f"sqlite:///{folder / file}"
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith("DELTAFORGE_") and value.strip()
    }
    return {**{f"DELTAFORGE_{name.upper()}": value for name, value in values.items()}, **variables}


def _flag(name: str, text: str | None) -> bool:
    if text not in {None, "true", "false"}:
        raise SettingsError(f"DELTAFORGE_{name} must be true or false")
    return text == "true"


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _state_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if url == "memory":
        return url
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return f"sqlite:///{_absolute(rest[1:])}"
    if separator and re.fullmatch(r"postgres(ql)?(\+psycopg)?", scheme):
        try:
            check_encoded(url)
        except SpecError as error:
            raise SettingsError(f"DELTAFORGE_STATE_URL {error}") from None
        return f"postgresql+psycopg://{rest}"
    raise SettingsError(
        "DELTAFORGE_STATE_URL must be sqlite:///FILE, postgresql://user:password@host/database "
        "or memory"
    )


def _journal_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _absolute(url).as_uri()
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not rest:
        raise SettingsError(
            "DELTAFORGE_JOURNAL_URL must be a path or a URL such as s3://bucket/dir"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise SettingsError("DELTAFORGE_JOURNAL_URL must have an absolute path: file:///DIR")
    return url
