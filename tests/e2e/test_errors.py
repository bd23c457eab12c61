"""What is wrong is said once and clearly, without passwords and stacks, and stops nobody else."""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import dagster as dg
import psycopg
import pytest

from deltaforge_dagster.sensors.every_tick import NOT_WELL
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.fix_postgres import StartPostgres

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

SECRET = "geheim-" + secrets.token_hex(6)
"""A password that stands in every bad file."""


@dataclass(frozen=True)
class Bad:
    """A pipeline file that cannot work, and the words of its one error."""

    name: str
    text: str
    words: tuple[str, ...]


def dsn_with(dsn: str, *, user: str | None = None, host: str | None = None, port: int = 0) -> str:
    """Return a DSN with other parts; another user's password is the secret."""
    parts = urlsplit(dsn)
    who = f"{quote(user)}:{SECRET}" if user else parts.netloc.rpartition("@")[0]
    where = f"{host or parts.hostname}:{port or parts.port}"
    return urlunsplit(parts._replace(netloc=f"{who}@{where}"))


@pytest.fixture
def reader(shop: Shop) -> Iterator[str]:
    """A role that may read the tables, and may not replicate."""
    name = f"reader_{secrets.token_hex(4)}"
    shop.execute(
        f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}",
    )
    yield name
    shop.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else can get: bound, not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def bad_sources(
    shop: Shop, reader: str, closed_port: int, start_postgres: StartPostgres
) -> list[Bad]:
    """Pipelines whose source cannot be read, one for each reason."""
    owner = urlsplit(shop.dsn).username
    unset = start_postgres({"wal_level": "replica"}).dsn
    with psycopg.connect(unset) as connection:
        connection.execute("CREATE TABLE customers (id bigint PRIMARY KEY)")
    cases = {
        "wrong-password": (dsn_with(shop.dsn, user=owner), "wrong password", str(owner)),
        "unknown-host": (
            dsn_with(shop.dsn, user="u", host="nowhere.invalid"),
            "nowhere.invalid",
            "name is unknown",
        ),
        "closed-port": (
            dsn_with(shop.dsn, user="u", port=closed_port),
            "127.0.0.1",
            "refused",
        ),
        "no-grant": (dsn_with(shop.dsn, user=reader), f'ALTER ROLE "{reader}" REPLICATION'),
        "wal-level": (unset, "wal_level is replica", "(wal_level=logical) and restart the server"),
    }
    found = [
        Bad(name, shop.pipeline(name, dsn=dsn, tables="[public.customers]"), tuple(words))
        for name, (dsn, *words) in cases.items()
    ]
    (publication,) = re.findall(r"publication: (\S+)", found[3].text)
    shop.execute(f"CREATE PUBLICATION {publication} FOR TABLE customers")  # needs its owner
    return found


def unreachable_sink(shop: Shop, port: int) -> Bad:
    """Return a pipeline whose only sink cannot be reached."""
    text = shop.pipeline("no-redis", run="{idle_seconds: 2, lease_seconds: 20, renew_seconds: 1}")
    text = text.replace(shop.redis_uri, f"redis://:{SECRET}@127.0.0.1:{port}/0")
    return Bad("no-redis", text, ("every sink is down", "redis", f"127.0.0.1:{port}"))


def broken_file() -> Bad:
    """Return a file that is not YAML, broken in the line of its password."""
    text = "metadata: {name: cut, tenant: acme}\nspec:\n  source: {config: {dsn: 'postgres://u:"
    return Bad("broken", text + SECRET + "@localhost/x\n", ("broken.yaml:", "YAML"))


def check_message(message: str | None, *words: str) -> None:
    """Prove that a message is one clear sentence: what we say, no secret, no stack."""
    assert message is not None
    for word in words:
        assert word in message
    assert message.count("\n") == 0, message
    assert len(message) < 500
    for never in (SECRET, "Traceback", 'File "', "psycopg.", "pg8000", "redis.exceptions"):
        assert never not in message


def evaluations(deployment: Deployment, *key: str, check: str) -> list[dg.AssetCheckEvaluation]:
    """Return every evaluation of a check, newest first."""
    history = deployment.instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(dg.AssetKey(list(key)), check), limit=50
    )
    events = [one.event.dagster_event for one in history if one.event is not None]
    return [event.asset_check_evaluation_data for event in events if event is not None]


def tick_messages(deployment: Deployment) -> set[str]:
    """Return what all ticks said; one that failed does so to be seen, and its error ends with what it says."""
    said = set()
    instance = deployment.instance
    for state in instance.all_instigator_state():
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=50):
            if tick.error is not None:
                assert tick.error.cause is not None, tick.error
                _, not_well, message = tick.error.cause.message.strip().partition(NOT_WELL)
                assert not_well, tick.error.cause
                said.add(message)
            said.add(tick.skip_reason or "")
    return said


def files_with(deployment: Deployment, text: str) -> list[Path]:
    """Return the files of a deployment, apart from the pipeline files, that hold a text."""
    return [
        path
        for path in deployment.folder.rglob("*")
        if path.is_file()
        and not path.is_relative_to(deployment.pipelines)
        and text.encode() in path.read_bytes()
    ]


def test_each_problem_shows_once_and_stops_nobody(
    shop: Shop,
    bad_sources: list[Bad],
    closed_port: int,
    reader: str,
    deploy: Callable[..., Deployment],
) -> None:
    """Seven bad pipelines beside a good one, which delivers; and the command says the same."""
    deployment = deploy()
    sink, broken = unreachable_sink(shop, closed_port), broken_file()
    for bad in (*bad_sources, sink, broken):
        deployment.add(bad.name, bad.text)
    deployment.add("good", shop.pipeline("good"))
    deployment.start()
    eventually(lambda: started(deployment, "good"), what="the first tick of good")
    eventually(lambda: started(deployment, sink.name), what="the first tick of no-redis")
    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")

    eventually(lambda: len(shop.entries("good.customers")) == 1, what="the good delivery")
    eventually(lambda: deployment.check("good", "redis", "delivered"), what="the good check")
    for bad in bad_sources:
        eventually(partial(deployment.check, bad.name, "changes", "source"), what=bad.name)
        (shown,) = evaluations(deployment, bad.name, "changes", check="source")
        assert not shown.passed
        check_message(shown.description, *bad.words)
        assert deployment.live_runs(bad.name) == []
    (shown,) = eventually(
        lambda: evaluations(deployment, "broken", "health", check="well"), what="broken"
    )
    check_message(shown.description, *broken.words)

    def down() -> str | None:
        """Return what the check of the sink says, once the sink has failed."""
        shown = deployment.check("no-redis", "redis", "delivered")
        text = None if shown is None else shown.description
        return text if text is not None and sink.words[-1] in text else None

    check_message(eventually(down, what="no-redis"), "behind, range 1", *sink.words[2:])
    (failed, *_) = eventually(
        lambda: [one for one in deployment.live_runs("no-redis") if one.dagster_run.is_failure],
        what="the failed run",
    )
    check_message(failure_of(deployment, failed.dagster_run.run_id), *sink.words)
    for message in tick_messages(deployment):
        check_message(message)
    good = evaluations(deployment, "good", "changes", check="source")
    assert all(one.passed for one in good)

    shop.execute(f"ALTER ROLE {reader} REPLICATION")
    eventually(lambda: started(deployment, "no-grant"), what="the start after the grant")
    fixed = eventually(  # reported by the same tick, after the start
        lambda: [
            one.passed for one in evaluations(deployment, "no-grant", "changes", check="source")
        ][:-1],
        what="the check after the grant",
    )
    assert all(fixed)
    shop.execute(f"ALTER ROLE {reader} NOREPLICATION")

    deployment.stop()
    say_the_same(deployment, [*bad_sources, sink, broken])
    for url in (shop.dsn, shop.redis_uri):
        assert files_with(deployment, str(urlsplit(url).password)) == []
    assert files_with(deployment, SECRET) == []


def failure_of(deployment: Deployment, run_id: str) -> str | None:
    """Return the description of a run's failure."""
    for entry in deployment.instance.all_logs(run_id):
        event = entry.dagster_event
        if event is not None and event.is_step_failure:
            failure = event.step_failure_data.user_failure_data
            return None if failure is None else failure.description
    return None


def say_the_same(deployment: Deployment, bad: list[Bad]) -> None:
    """`deltaforge run` and `deltaforge validate`: one message behind lines of the log, no stack."""
    runs = {one.name: deployment.command("run", one.name, "--until-caught-up") for one in bad}
    for one in bad:
        run = runs[one.name]
        assert run.wait() == (2 if one.name == "broken" else 1), one.name
        *logged, last = run.output.strip().splitlines()
        check_message(last, "error: ", *one.words)
        for line in logged:
            assert json.loads(line)["level"] in {"INFO", "WARN"}
            assert SECRET not in line

    validate = deployment.command("validate", str(deployment.pipelines))
    assert validate.wait() == 1
    lines = validate.output.strip().splitlines()
    (problem,) = [line for line in lines if line.startswith("error")]
    check_message(problem, *next(one for one in bad if one.name == "broken").words)
