"""Faults strike exactly as their control file says, in whichever process the sink lives."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SettingsError, SinkUnavailable
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.testing.sinks import allow, messages
from deltaforge_lab.faulty_sink import FaultySink
from tests.sinks.messages import closed_during


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """The control file of sink `lines`; not there yet."""
    (tmp_path / "faults").mkdir()
    return tmp_path / "faults" / "lines"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The sink's file."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def sink(control: Path, path: Path) -> FaultySink:
    """An open file sink, wrapped."""
    sink = FaultySink(FileSink("lines", compile_template(str(path))), "lines", control.parent)
    sink.open()
    return sink


def send(sink: FaultySink, path: Path) -> int:
    """Send the values 0 to 9."""
    return sink.send(messages([(str(path), str(n)) for n in range(10)]), allow)


def delivered(path: Path) -> int:
    """Return the number of values in the file."""
    return len(path.read_text().split()) if path.exists() else 0


def test_no_fault_without_a_control_file(sink: FaultySink, path: Path) -> None:
    """The wrapper adds nothing while there is no control file."""
    assert (send(sink, path), delivered(path)) == (13, 10)


@pytest.mark.parametrize(("fault", "count"), [("before", 0), ("during", 5), ("after", 10)])
def test_failures(sink: FaultySink, path: Path, control: Path, fault: str, count: int) -> None:
    """Nothing, half, or all of a batch arrives before the failure, each time it is sent."""
    control.write_text(f"fail_{fault}")

    for times in (1, 2):
        with pytest.raises(SinkUnavailable, match=f"fail_{fault}"):
            send(sink, path)
        assert times * count == delivered(path)

    control.unlink()
    send(sink, path)
    assert 2 * count + 10 == delivered(path)


@pytest.mark.parametrize("fault", ["fail_before", "fail_during", "fail_after"])
def test_once(sink: FaultySink, path: Path, control: Path, fault: str) -> None:
    """A fault that strikes once removes its control file."""
    control.write_text(f"{fault} once\n")

    with pytest.raises(SinkUnavailable, match=fault):
        send(sink, path)

    assert not control.exists()
    send(sink, path)


def test_half_of_one_message(sink: FaultySink, path: Path, control: Path) -> None:
    """Half of a single message is nothing."""
    control.write_text("fail_during")

    with pytest.raises(SinkUnavailable):
        sink.send(messages([(str(path), "1")]), allow)

    assert delivered(path) == 0


def test_open_fails(sink: FaultySink, control: Path) -> None:
    """A sink that cannot be reached cannot be opened; faults of delivery wait for one."""
    sink.close()
    control.write_text("fail_before once")

    with pytest.raises(SinkUnavailable, match="fail_before"):
        sink.open()
    control.write_text("fail_during once")
    sink.open()

    assert control.exists()


def test_slow(sink: FaultySink, path: Path, control: Path) -> None:
    """A slow sink delivers after the given seconds."""
    control.write_text("slow 0.3 once")
    started = time.monotonic()

    send(sink, path)

    assert 0.3 <= time.monotonic() - started < 60
    assert (delivered(path), control.exists()) == (10, False)


def test_hang_ends_when_the_file_goes(sink: FaultySink, path: Path, control: Path) -> None:
    """A hanging sink delivers once the control file is removed."""
    control.write_text("hang")
    thread = threading.Thread(target=send, args=(sink, path))
    thread.start()
    thread.join(0.2)
    hung = thread.is_alive()

    control.unlink()
    thread.join(60)

    assert (hung, thread.is_alive(), delivered(path)) == (True, False, 10)


@pytest.mark.parametrize("fault", ["hang", "hang once", "slow 60"])
@pytest.mark.parametrize("call", ["open", "send"])
def test_close_ends_waiting(
    sink: FaultySink, path: Path, control: Path, fault: str, call: str
) -> None:
    """`close` from another thread ends a call that hangs; nothing is delivered."""
    control.write_text(fault)

    error = closed_during(sink, sink.open if call == "open" else lambda: send(sink, path))

    assert ("closed meanwhile" in str(error), delivered(path)) == (True, 0)


def test_unknown_fault(sink: FaultySink, path: Path, control: Path) -> None:
    """A misspelt fault is an error, so that a test cannot pass by accident."""
    control.write_text("fail_sometimes")

    with pytest.raises(SettingsError, match="fail_sometimes"):
        send(sink, path)


def test_strikes_another_process(control: Path, path: Path) -> None:
    """A fault that strikes once strikes one process of several."""
    control.write_text("fail_before once")
    program = f"""
from pathlib import Path
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_lab.faulty_sink import FaultySink
from deltaforge_dagster.sinks.file.sink import FileSink
sink = FaultySink(FileSink("lines", compile_template({str(path)!r})), "lines", Path({str(control.parent)!r}))
try:
    sink.open()
except SinkUnavailable:
    print("struck")
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    outputs = [process.communicate(timeout=240)[0] for process in processes]

    assert sorted(outputs) == ["", "struck\n"]
