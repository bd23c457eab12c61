"""Run a real Kafka broker in a temporary directory.

Kafka 4.3 comes from Maven Central (see `maven`; 44 MB) and runs on the same Java as Spark: one
process that is broker and controller (KRaft), without passwords, on a free port of 127.0.0.1.
Topics are created automatically with one partition; transactions work, with one replica.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.process import (
    ServerProcess,
    free_port,
    run_as,
    temporary_directory,
)
from deltaforge_lab.servers.base import OneProcessServer
from deltaforge_lab.servers.maven import fetch, parse_pins

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
            data_dir: The data directory, empty or new, which `close` keeps; None for a temporary
                one.
            settings: Broker settings that override the defaults, by their names in
                server.properties.
            quick: Start faster, without the optimizing compiler.

        Raises:
            SettingsError: There is no Java, the programs cannot be downloaded, or the broker did
                not start.
        """
        server = cls("")
        jars = ":".join(map(str, fetch(_JARS)))
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
        while not _answers(admin, name, partitions):
            if time.monotonic() > deadline:
                raise SettingsError(f"Kafka: topic {name!r} is not served in time")
            time.sleep(0.02)

    def _listen(self, port: int) -> None:
        self._brokers = f"127.0.0.1:{port}"
        controller = f"127.0.0.1:{free_port(but=port)}"
        self._settings["listeners"] = f"PLAINTEXT://{self._brokers},CONTROLLER://{controller}"
        self._settings["controller.quorum.voters"] = f"1@{controller}"

    def _format(self) -> None:
        # As a single word, because an id may begin with a hyphen.
        cluster = f"--cluster-id={self._cluster}"
        command = [*self._java, "kafka.tools.StorageTool", "format", cluster]
        config = ["-c", str(self._write_settings())]
        outcome = run_as([*command, *config], None, self._directory())
        if outcome.returncode:
            lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
            reason = [line for line in lines if not line.startswith(("at ", "SLF4J"))]
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


def _answers(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Return whether each partition is served by its leader.

    The metadata names a leader before that broker itself knows that it is the leader.
    """
    newest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(topic, partition): newest for partition in range(partitions)}
    try:
        for future in admin.list_offsets(wanted, request_timeout=_START_SECONDS).values():
            future.result()
    except KafkaException:
        return False
    return True


def installed_version() -> str:
    """Return the version that `start` would start, or why it would fail; downloads nothing."""
    try:
        return f"{VERSION} from Maven Central, on {find_java()}"
    except SettingsError as error:
        return str(error)


_JARS = parse_pins("""
at.yawk.lz4:lz4-java:1.10.2 252dabd586d22149a31661a8afc1a50747714eb1a298bd4a6e780c8c91a13866
com.dynatrace.hash4j:hash4j:0.22.0 23028a3fd006e530bf495f551083208187cafd8f80624d048eba56442f16a50e
com.fasterxml.jackson.core:jackson-annotations:2.21 53ca085f4a150f703f49e1aabd935bd03b43e1ea3d55d135438292af22cef56b
com.fasterxml.jackson.core:jackson-core:2.21.2 12e8655b100267b44d0f14d01b1f5082a5105e616174dc4307be1a761e92407b
com.fasterxml.jackson.core:jackson-databind:2.21.2 8c982f01f148d805f0aaac2339011244757e0df7c6ff8951f2fa3f433b8ed849
com.fasterxml.jackson.dataformat:jackson-dataformat-csv:2.21.2 682f8c7977e02a42748426bf54946e32e52e2f80b84b6642801ab12bd541368a
com.fasterxml.jackson.dataformat:jackson-dataformat-yaml:2.21.2 d25551812fa0c14f37cabaa9401e63eadcea42ce36311183af5622d5bc8a1bc7
com.fasterxml.jackson.datatype:jackson-datatype-jdk8:2.21.2 e581bbf3fc5622d16b57366dd41e10fc56921fb202879de2ef487f87dd9b30e7
com.github.ben-manes.caffeine:caffeine:3.2.0 ec411dfdf0c03f25218648ce89861630b71680e5858a9a7278ebac8e55cab3d7
com.github.luben:zstd-jni:1.5.6-10 b6c3237e24b8252a5a9c3a0e1ae30ef8f323412e74bd358548b7a9e527d676df
com.google.re2j:re2j:1.8 7b52c72156dd7f98b3237a5b35c1d34fba381b21048c89208913ad80a45dfbd7
com.typesafe.scala-logging:scala-logging_2.13:3.9.6 0ad0c3f4d89d538b3b6c300158555e266aa69cf1b5f6522aba8b5bad238eb994
com.yammer.metrics:metrics-core:2.2.0 6b7a14a6f34c10f8683f7b5e2f39df0f07b58c7dff0e468ebbc713905c46979c
commons-beanutils:commons-beanutils:1.11.0 9e44ba68ec9a3f21286fa2a8bbb003b735c0f69101bb43144b79f4f8aaa74709
commons-collections:commons-collections:3.2.2 eeeae917917144a68a741d4c0dff66aa5c5c5fd85593ff217bced3fc8ca783b8
commons-digester:commons-digester:2.1 e0b2b980a84fc6533c5ce291f1917b32c507f62bcad64198fff44368c2196a3d
commons-logging:commons-logging:1.3.5 6d7a744e4027649fbb50895df9497d109f98c766a637062fe8d2eabbb3140ba4
commons-validator:commons-validator:1.10.1 ed74711a78d793ca37f6075e4a1e93d107233dfd20d0bb17e32bad88d38e56aa
net.sf.jopt-simple:jopt-simple:5.0.4 df26cc58f235f477db07f753ba5a3ab243ebe5789d9f89ecf68dd62ea9a66c28
net.sourceforge.argparse4j:argparse4j:0.7.0 65ceb669d88f63306c680f8088bbf765bbca72d288a61a03703000076c3d3f56
org.apache.kafka:kafka-clients:4.3.0 97a5b492d4ad658fd2dfba969fa0e403c2e38c971fb1e083da4e391471925fc1
org.apache.kafka:kafka-coordinator-common:4.3.0 245f2d1ebe0559efb7fc7615cda06f5c25b47e98d137a354a05cc50687821244
org.apache.kafka:kafka-group-coordinator-api:4.3.0 c78dbb49e91bb0f735dc03d07a66f1cb1c0e1db4bf6c2d9a57811c744d93ca5b
org.apache.kafka:kafka-group-coordinator:4.3.0 98bf277fca9facf134a7599a5c13dc146b9fbaf5ce961dd412914d3ff9b44356
org.apache.kafka:kafka-metadata:4.3.0 4cf62c7bea64ff57ccd150ac457b02216e28801472caefd436377cbedd29a1c5
org.apache.kafka:kafka-raft:4.3.0 7517424a299da3e9fcdeccd52058b3ca6e95a1ed7feb9a32c3e12836d02cff8d
org.apache.kafka:kafka-server-common:4.3.0 f272a83ad222b2747635239cdb2601c0a3f83fc874b4a1adf104afb8daf66133
org.apache.kafka:kafka-server:4.3.0 4e94e517a4b1c86ee1d41401d0c394556880abba515c7ca4f4eb229a4673422c
org.apache.kafka:kafka-share-coordinator:4.3.0 3848748f35dfe8b3b8e39cc546d129e586b5e039f0d10459d4b0bf05cefdecaa
org.apache.kafka:kafka-storage-api:4.3.0 dd4e05a693dd9e546545a70cff6c36b4125fefd067df6126541e23156df315e6
org.apache.kafka:kafka-storage:4.3.0 9e13c0cd8de0bf1fc24cad5d498b21c6683815e771a7148c43fac79b6a515c79
org.apache.kafka:kafka-tools-api:4.3.0 4794083021c84cb068f0865308791f076e66e609db5ba6f6aaed858aedacb926
org.apache.kafka:kafka-transaction-coordinator:4.3.0 1f6cb1ebf449a6772ca22f7470b206a1845bd172fe64131848c80be7c13aa096
org.apache.kafka:kafka_2.13:4.3.0 e3669cb733f657689f71cba145af51022f29cebba81d8bf69699274b46c70da8
org.apache.logging.log4j:log4j-api:2.25.4 c4b642a7f047275215de117e0e3847eb2c7711d84a0aa7433e7b3c096daf341d
org.apache.logging.log4j:log4j-core:2.25.4 10fee2c0485d54fa44ee75d314f6295508f7b932281873db61a91b88073200e6
org.apache.logging.log4j:log4j-slf4j-impl:2.25.4 7ac68a0afcc83d54f48d116d79370a43f0a2a6b71b5c1d6dda943bb6a95ddbaa
org.bitbucket.b_c:jose4j:0.9.6 7314af50cde9c99e8eaf43eee617a23edcc6bb43036221064355094999d837ef
org.hdrhistogram:HdrHistogram:2.2.2 22d1d4316c4ec13a68b559e98c8256d69071593731da96136640f864fa14fad8
org.jspecify:jspecify:1.0.0 1fad6e6be7557781e4d33729d49ae1cdc8fdda6fe477bb0cc68ce351eafdfbab
org.pcollections:pcollections:4.0.2 2bbeef5797a241300c4f7513cd546239629ed7deda4fc0c31df90bb95f5f13ef
org.scala-lang:scala-library:2.13.18 4e85d96ff7bc7dc627985523c3541b9917aaa08e956391380c42db21a2c4e5a0
org.scala-lang:scala-reflect:2.13.18 6935ff1982b2ac93d695f15aa66921be2f602921277afe002f018fd8c7d6e29b
org.slf4j:slf4j-api:1.7.36 d3ef575e3e4979678dc01bf1dcce51021493b4d11fb7f1be8ad982877c16a1c0
org.xerial.snappy:snappy-java:1.1.10.7 4c766cb3f855415ee734b2392949a0b6f12a60879334a74518deaf6270d32e36
org.yaml:snakeyaml:2.5 e6682acf1ace77508ef13649cbf4f8d09d2cf5457bdb61d25ffb6ac0233d78dd
""")
"""Kafka's runtime dependencies as resolved by Maven, and log4j's SLF4J binding."""
