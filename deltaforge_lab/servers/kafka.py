"""Run a real Kafka broker in a temporary directory.

Kafka 4.3 comes from Maven Central (see `maven`; 44 MB) and runs on the same Java as Spark: one
process that is broker and controller (KRaft), without passwords, on a free port of 127.0.0.1. Topics
are created automatically with one partition; transactions work, with one replica.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.processes.java import find_java
from deltaforge_dagster.processes.process import (
    ServerProcess,
    free_port,
    run_as,
    temporary_directory,
)
from deltaforge_lab.servers.base import OneProcessServer
from deltaforge_lab.servers.kafka_jars import JARS
from deltaforge_lab.servers.maven import fetch

VERSION = "4.3.0"

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "true",
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "1500",  # how long a killed broker counts as alive
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": "16777216",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
}
_HEAP = "-Xmx256m"
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""With these options the broker starts in two seconds of processor time."""
# One line per event, so that the last line of a failed start is the reason, not a stack trace.
_LOGGING = """\
rootLogger = ERROR, STDOUT
appender.0.type = Console
appender.0.name = STDOUT
appender.0.layout.type = PatternLayout
appender.0.layout.pattern = %p %c{1}: %m %throwable{short.message}%n
"""
_START_SECONDS = 180.0


class KafkaServer(OneProcessServer):
    """A Kafka broker, created by `start` or `attach`."""

    _stop_seconds = 20.0

    def __init__(self, brokers: str) -> None:
        super().__init__("Kafka")
        self._brokers = brokers
        self._cluster = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        self._java: list[str] = []

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        quick: bool = True,
    ) -> Self:
        """Create a cluster of one broker and start it.

        Args:
            data_dir: The data directory, empty or new, which `close` keeps; None for a temporary one.
            settings: Broker settings that override the defaults, by their names in server.properties.
            quick: Start faster, without the optimizing compiler.

        Raises:
            SettingsError: There is no Java, the programs cannot be downloaded, or the broker did not
                start.
        """
        server = cls("")
        jars = ":".join(map(str, fetch(JARS)))
        server._temporary = temporary_directory("kafka", None)
        try:
            logging = server._temporary / "log4j2.properties"
            logging.write_text(_LOGGING)
            server._java = [
                str(find_java() / "bin" / "java"), *(_QUICK if quick else ()), _HEAP,
                f"-Dlog4j2.configurationFile={logging.as_uri()}",
                f"-Djava.io.tmpdir={server._temporary}", "-cp", jars,
            ]  # fmt: skip
            server._data = (data_dir or server._temporary / "data").absolute()
            server._settings = {**_SETTINGS, "log.dirs": str(server._data), **(settings or {})}
            server._listen(free_port())
            server._format()
            server._run_on_free_port(server._listen)
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def attach(cls, brokers: str) -> Self:
        """Use an external cluster; it is never stopped and keeps its data."""
        return cls(brokers)

    @property
    def brokers(self) -> str:
        """`host:port`."""
        return self._brokers

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        settings: Mapping[str, str] | None = None,
        *,
        replicas: int = 1,
    ) -> None:
        """Create a topic, and return when it can be used.

        Args:
            name: Its name.
            partitions: The number of partitions.
            settings: The topic's settings, such as `{"max.message.bytes": "1000"}`.
            replicas: The replication factor.
        """
        topic = NewTopic(name, partitions, replicas, config=dict(settings or {}))
        admin = self._admin()  # kept in a variable: the request is cancelled with its client
        admin.create_topics([topic])[name].result(_START_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while not _is_led(admin, name, partitions):
            if time.monotonic() > deadline:
                raise SettingsError(f"Kafka: topic {name!r} has no leader in time")
            time.sleep(0.02)

    def _listen(self, port: int) -> None:
        self._brokers = f"127.0.0.1:{port}"
        controller = f"127.0.0.1:{free_port()}"
        self._settings["listeners"] = f"PLAINTEXT://{self._brokers},CONTROLLER://{controller}"
        self._settings["controller.quorum.voters"] = f"1@{controller}"

    def _format(self) -> None:
        # As a single word, because an id may begin with a hyphen.
        cluster = f"--cluster-id={self._cluster}"
        command = [*self._java, "kafka.tools.StorageTool", "format", cluster]
        config = ["-c", str(self._write_settings())]
        outcome = run_as([*command, *config], None, self._directory())
        if outcome.returncode:
            said = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
            reason = [line for line in said if not line.startswith(("at ", "SLF4J"))]
            raise SettingsError(f"Kafka cannot create its files: {' / '.join(reason[:3])}")

    def _run(self) -> None:
        self._process = ServerProcess(
            "Kafka",
            [*self._java, "kafka.Kafka", str(self._write_settings())],
            directory=self._directory(),
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _write_settings(self) -> Path:
        file = self._directory() / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in self._settings.items()))
        return file

    def _directory(self) -> Path:
        assert self._temporary
        return self._temporary

    def _admin(self) -> AdminClient:
        quiet = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
        return AdminClient({"bootstrap.servers": self._brokers, **quiet})

    def _answers(self) -> bool:
        try:
            return bool(self._admin().list_topics(timeout=1).brokers)
        except KafkaException:
            return False


def _is_led(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Return whether the brokers know the leader of each partition; the controller knows it earlier."""
    try:
        found = admin.list_topics(topic, timeout=_START_SECONDS).topics[topic]
    except KafkaException:
        return False
    leaders = [one.leader for one in found.partitions.values()]
    return found.error is None and len(leaders) == partitions and min(leaders) >= 0


def installed_version() -> str:
    """Return the version that `start` would start, or why it would fail; downloads nothing."""
    try:
        return f"{VERSION} from Maven Central, on {find_java()}"
    except SettingsError as error:
        return str(error)
