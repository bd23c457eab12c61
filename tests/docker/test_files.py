"""Containers without an engine: what the files of `docker/` name is there, and fits together."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from deltaforge_dagster.cli.installation.dagster_processes import (
    ANSWER_SECONDS,
    THREAD_VARIABLES,
    THREADS,
)
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.installation.spark_server import LAKE_SETTINGS
from deltaforge_lab.servers.mysql import execute
from tests.docker.compose import DOCKER, ROOT, Service, read, services, variables
from tests.pipeline.changes import eventually

FILES = {
    "one host": ("compose.yaml",),
    "samples": ("compose.yaml", "compose.samples.yaml"),
    "scaled": ("compose.yaml", "compose.scaled.yaml"),
}
OURS = "deltaforge-dagster"
MADE_BY_THE_USER = {"./tls/ca.crt", "./tls/server.crt", "./tls/server.key"}


@pytest.fixture(params=list(FILES.values()), ids=list(FILES))
def files(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Files that are used together."""
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture
def whole(files: tuple[str, ...]) -> dict[str, Any]:
    """Their contents, with every variable set to its name in small letters."""
    return read({name: name.lower() for name in variables(*files)}, *files)


@pytest.fixture
def parts(files: tuple[str, ...]) -> dict[str, Service]:
    """Their services."""
    return services({name: name.lower() for name in variables(*files)}, *files)


def test_what_is_named_is_there(whole: dict[str, Any], parts: dict[str, Service]) -> None:
    """Volumes, secrets and configs are declared, files exist, and services wait for services."""
    declared = {kind: whole.get(kind, {}) for kind in ("volumes", "secrets", "configs")}
    for service in parts.values():
        for volume in service.definition.get("volumes", []):
            source, target = volume.split(":")[:2]
            assert target.startswith("/")
            if not source.startswith("."):
                assert source in declared["volumes"], volume
            elif source not in MADE_BY_THE_USER:
                assert (DOCKER / source).exists(), volume
        for secret in service.definition.get("secrets", []):
            assert secret in declared["secrets"]
        for config in service.definition.get("configs", []):
            assert config["source"] in declared["configs"]
        for other in service.definition.get("depends_on", []):
            assert other in parts
    for secret in declared["secrets"].values():
        assert secret.get("environment") or secret["file"] in MADE_BY_THE_USER


def test_hosts_are_services(parts: dict[str, Service]) -> None:
    """Every address that a service of ours is given names a service, at a port that it listens on."""
    listening = {
        "postgres": 5432,
        "shop": 5432,
        "stock": 3306,
        "redis": 6379,
        "nats": 4222,
        "spark-tls": 15443,
    }
    for service in parts.values():
        text = " ".join([*service.command, *service.environment.values()])
        for host, port in re.findall(r"(?:://|@|=)([a-z][a-z-]*):([0-9]+)", text):
            if host != "localhost":
                assert host in parts, text
                other = parts[host]
                there = " ".join([*other.command, *other.environment.values()])
                assert port in there or listening.get(host) == int(port), (service.name, host)


def test_our_services_have_usable_settings(parts: dict[str, Service]) -> None:
    """What a service of our image is given are variables that exist, with values that are taken."""
    known = set(
        re.findall(r"DELTAFORGE_[A-Z_]+", Path(ROOT / "docs" / "configuration.md").read_text())
    )
    programs = {"deltaforge", "dagster-webserver", "dagster-daemon", "spark-submit", "spark-class"}
    for service in parts.values():
        if service.image != OURS:
            continue
        Settings.from_env(service.environment)
        names = {name for name in service.environment if name.startswith("DELTAFORGE_")}
        assert names <= known
        assert not service.command or service.command[0] in programs
        assert service.definition["restart"] == "unless-stopped"


def test_a_run_has_the_time_to_start_that_dev_gives(parts: dict[str, Service]) -> None:
    """Who waits for the code server waits as long; by Dagster's own time a busy host's runs fail."""
    for name in ("webserver", "daemon"):
        assert parts[name].environment["DAGSTER_GRPC_TIMEOUT_SECONDS"] == f"{ANSWER_SECONDS}"


def test_the_code_server_has_the_threads_that_dev_gives(parts: dict[str, Service]) -> None:
    """Both of its processes; by Dagster's own number, ticks that watch would leave too few for others."""
    for name in THREAD_VARIABLES:
        assert parts["code"].environment[name] == f"{THREADS}"


def test_the_image_has_what_the_services_use() -> None:
    """The Dockerfile copies files that exist, as an ordinary user, with compiled kernels.

    The user is a number, without which Kubernetes does not take its word for not being root.
    """
    text = (DOCKER / "Dockerfile").read_text()
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in copied.split():
            assert (ROOT / source).exists(), source
    assert text.index("USER 1000:1000") < text.index("RUN deltaforge warm") < text.index("CMD")
    (module,) = re.findall(r'"-m", "([a-z_.]+)"\]', text)
    assert (ROOT / (module.replace(".", "/") + ".py")).exists()


def test_spark_finds_the_jars_of_the_image() -> None:
    """Spark's class paths are the folder into which they are installed, and it has what the local server has."""
    text = (DOCKER / "Dockerfile").read_text()
    (folder,) = re.findall(r"DELTAFORGE_LAKE_JARS=(\S+)", text)
    assert text.index("RUN deltaforge lake install") < text.index("USER 1000:1000")
    lines = (DOCKER / "spark" / "spark-defaults.conf").read_text().splitlines()
    settings = dict(line.split() for line in lines if line and not line.startswith("#"))

    for process in ("driver", "executor"):
        assert settings[f"spark.{process}.extraClassPath"] == f"{folder}/*"
    assert LAKE_SETTINGS.items() <= settings.items()


def test_what_is_copied_is_whole() -> None:
    """What the image is built from is not left out, and no link of it leads to what is."""
    text = (DOCKER / "Dockerfile").read_text()
    copied = [
        ROOT / source
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for source in sources.split()
    ]
    everything, *kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert everything == "*"
    context = [ROOT / line[1:] for line in kept if line.startswith("!")]
    for path in copied:
        assert any(path.is_relative_to(part) for part in context), path
        for link in filter(Path.is_symlink, [path, *path.rglob("*")]):
            assert any(link.resolve().is_relative_to(part) for part in copied), link


def test_the_image_is_locked_as_everything_is() -> None:
    """The image's packages are of `requirements.lock`, with its hashes, and no direct one is missing.

    Only Kubernetes' client and what it brings is not there, because tests do not need it.
    """
    whole, image = (_locked(path) for path in (ROOT, DOCKER))
    assert all(image.values())
    common = image.keys() & whole.keys()
    assert {name: image[name] for name in common} == {name: whole[name] for name in common}
    assert {name.partition("==")[0] for name in image.keys() - common} == {
        "dagster-k8s", "durationpy", "google-auth", "kubernetes", "oauthlib", "pyasn1",
        "pyasn1-modules", "requests-oauthlib", "websocket-client",
    }  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["s3"],
        *project["project"]["optional-dependencies"]["k8s"],
        *project["dependency-groups"]["build"],
    ]
    packages = {name.partition("==")[0] for name in image}
    assert {re.split(r"[\[<>=]", one)[0].lower() for one in needed} <= packages


@pytest.mark.parametrize(
    ("file", "lock", "first"),
    [
        ("Makefile", "requirements.lock", {"uv", "setuptools"}),
        ("docker/Dockerfile", "docker/requirements.lock", {"setuptools"}),
    ],
)
def test_what_is_built_is_built_with_locked_packages(file: str, lock: str, first: set[str]) -> None:
    """No install from the lock builds in an environment of its own, which would get packages by no hash."""
    text = (ROOT / file).read_text()
    (program,) = re.findall(r"awk '(.+)' requirements\.lock > ", text)
    script = program.replace("$$", "$")  # as make does; the Dockerfile has none
    output = subprocess.run(
        ["awk", script, ROOT / lock], check=True, capture_output=True, text=True
    ).stdout
    kept = re.findall(
        r"^([a-z]+)==[0-9.]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+",
        output,
        re.MULTILINE,
    )
    assert set(kept) == first
    installs = re.findall(r"^.*--require-hashes.*-r \S+", text, re.MULTILINE)
    assert len(installs) == 2
    assert "--no-build-isolation" in installs[1]


def _locked(folder: Path) -> dict[str, set[str]]:
    """Return the hashes of each package and version of a lock file."""
    found: dict[str, set[str]] = {}
    for package, digest in re.findall(
        r"^([^ #\n]+==\S+)|--hash=sha256:([0-9a-f]{64})",
        (folder / "requirements.lock").read_text(),
        re.MULTILINE,
    ):
        if package:
            found[package] = set()
        else:
            found[list(found)[-1]].add(digest)
    return found


def test_prometheus_and_grafana_find_their_files() -> None:
    """Each file of theirs is YAML or JSON, and Prometheus looks where the API has its metrics."""
    read_files = {
        path.relative_to(DOCKER): yaml.safe_load(path.read_text())
        for folder in ("prometheus", "grafana")
        for path in (DOCKER / folder).rglob("*")
        if path.is_file()
    }
    scraped = read_files[Path("prometheus/prometheus.yml")]["scrape_configs"]
    targets = [
        target for job in scraped for one in job["static_configs"] for target in one["targets"]
    ]
    assert targets == ["api:9000"]
    api = services(dict.fromkeys(variables("compose.yaml"), "x"), "compose.yaml")["api"]
    assert api.command[api.command.index("--metrics-addr") + 1].endswith(":9000")
    (token,) = (job["authorization"]["credentials_file"] for job in scraped)
    whole = read(dict.fromkeys(variables("compose.yaml"), "x"), "compose.yaml")
    assert Path(token).name in whole["services"]["prometheus"]["secrets"]


def test_the_sample_pipelines_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples' pipelines are ones that can be used, with the addresses of their services."""
    environment = {"POSTGRES_PASSWORD": "p", "DELTAFORGE_API_TOKEN": "t"}
    given = services(environment, *FILES["samples"])["code"].environment
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    pipelines = load_pipelines(DOCKER / "samples" / "pipelines", strict=True)

    sources = {}
    for loaded in pipelines:
        assert isinstance(loaded, LoadedPipeline)
        spec = loaded.spec.spec
        sources[loaded.name] = (spec.source.type, [sink.config.id for sink in spec.sinks])
    assert sources == {
        "shop": ("postgres", ["redis", "kafka", "nats"]),
        "stock": ("mysql", ["redis", "kafka"]),
    }


def test_the_needed_version_of_compose_is_named() -> None:
    """The files have what Compose has had since 2.23.1 (contents of configs), and say so."""
    text = (DOCKER / "compose.yaml").read_text()
    assert "content" in yaml.safe_load(text)["configs"]["dagster-database"]
    for path in (DOCKER / "compose.yaml", ROOT / "docs" / "scale.md"):
        assert re.search(r"Docker Compose (must be )?2\.23\.1 or newer", path.read_text())


def test_the_stock_of_the_samples_changes(mysql_dsn: str) -> None:
    """The server runs the samples' file, its event changes rows, and its user may read the log."""
    user = f"stock{uuid4().hex[:8]}"
    text = (DOCKER / "samples" / "stock.sql").read_text().replace("TO stock", f"TO {user}")
    execute(mysql_dsn, f"CREATE USER {user}")
    try:
        execute(mysql_dsn, *filter(str.strip, text.split(";\n")))
        eventually(
            lambda: execute(mysql_dsn, "SELECT SUM(amount) < 400 FROM products") == [(1,)],
            seconds=60,
        )
        assert "REPLICATION SLAVE, REPLICATION CLIENT" in str(
            execute(mysql_dsn, f"SHOW GRANTS FOR {user}")
        )
    finally:
        execute(mysql_dsn, "DROP EVENT IF EXISTS trade", f"DROP USER {user}")
