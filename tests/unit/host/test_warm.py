"""What a warm process forks is as if its parent had executed it, and outlives nobody it may not."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.host import warm as warm_module
from liver_hpc.host.child import Child, Command, new_mark
from liver_hpc.host.marks import marked_processes
from liver_hpc.host.warm import ForkRefused, WarmProcess

pytestmark = pytest.mark.timeout(60)

SOON_S = 20.0

# Forks what notes who it is, and then does as it is told.
WARM = """
import json, os, signal, socket, subprocess, sys, threading, time
from liver_hpc.host import forking
from liver_hpc.host.forking import serve

def work(arguments):
    directory, then = arguments
    line = os.environ.get("LINE")
    note = {
        "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0),
        "environment": dict(os.environ), "threads": len(os.listdir("/proc/self/task")),
        "open": sorted(int(d) for d in os.listdir("/proc/self/fd")), "shared": id(SHARED),
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    if then == "has a child":
        note["child"] = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True).pid
    draft = f"{directory}/draft"
    open(draft, "w").write(json.dumps(note))
    os.rename(draft, f"{directory}/note")
    print("at work", flush=True)
    if line is not None:
        socket.socket(fileno=int(line)).send(b"hello")
    if then == "fails":
        raise ValueError("no")
    if then.isdigit():
        sys.exit(int(then))
    if then != "returns":
        threading.Event().wait()

SHARED = []
line = socket.socket(fileno=int(sys.argv[-1]))
if "refuses" in sys.argv:
    line.send(b"ConfigError: no such recipe")
    sys.exit(1)
if "has a thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if "has a helper" in sys.argv:
    subprocess.Popen(["/bin/sleep", "60"])
if "shows late" in sys.argv:
    show = forking._show
    forking._show = lambda order: (time.sleep(1.0), show(order))
serve(line, work)
"""

# A parent to be killed: says who its warm process and its forked one are.
PARENT = f"""
import sys, threading
from pathlib import Path
from liver_hpc.host.child import Command
from liver_hpc.host.warm import WarmProcess
directory = Path(sys.argv[1])
warm = WarmProcess(Command("warm", [sys.executable, "-c", {WARM!r}]))
assert warm.hear() == ""
words = ["a", "worker"]
command = Command("a worker", words, environment={{}}, log=directory / "log")
forked = warm.fork(command, [str(directory), "waits"], {{}})
print(warm.pid, forked.pid, flush=True)
threading.Event().wait()
"""


class Warm:
    """A warm process, and what it has forked; all ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "logs" / "worker.log"
        self.children: list[Child] = []

    def start(self, *words: str, **options: Any) -> WarmProcess:
        command = Command("the warm one", [sys.executable, "-c", WARM, *words], **options)
        warm = WarmProcess(command)
        self.children.append(warm)
        return warm

    def fork(
        self,
        warm: WarmProcess,
        then: str = "waits",
        passed: dict[str, int] | None = None,
        **options: Any,
    ) -> Child:
        words = [sys.executable, "-m", "the.worker", "--layout", "tp2"]
        command = Command("worker 0", words, **{"environment": {}, "log": self.log, **options})
        child = warm.fork(command, [str(self.directory), then], passed or {})
        self.children.append(child)
        return child

    def note(self) -> dict[str, Any]:
        path = self.directory / "note"
        poll_until(path.exists, Deadline.after(SystemClock(), SOON_S, "the forked one's note"))
        noted: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return noted


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Warm]:
    warm = Warm(tmp_path)
    yield warm
    for child in warm.children:
        child.end(0.0)


def ready(warm: WarmProcess) -> WarmProcess:
    assert select.select([warm.line], [], [], SOON_S)[0]
    assert warm.hear() == ""
    assert warm.ready
    return warm


def ends(pid: int, limit_s: float = SOON_S) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def test_a_forked_process_is_a_child_of_who_asked_for_it(made: Warm) -> None:
    warm = ready(made.start())
    child = made.fork(warm, "7", environment={"LIVER_LOCAL_RANK": "3"})
    note = made.note()
    assert (note["pid"], note["parent"]) == (child.pid, os.getpid())
    assert note["group"] == os.getpgid(0)
    assert note["environment"]["LIVER_LOCAL_RANK"] == "3"
    assert (note["threads"], note["blocked"]) == (1, [])
    assert note["open"][:3] == [0, 1, 2]
    assert len(note["open"]) == 4  # and that by which it looked
    assert child.wait(SOON_S) == 7
    assert child.how() == "exit code 7"
    assert made.log.read_text() == "at work\n"


def test_it_is_shown_as_the_worker_that_it_is(made: Warm) -> None:
    warm = ready(made.start())
    child = made.fork(warm)
    made.note()
    line = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
    assert line[:5] == [sys.executable.encode(), b"-m", b"the.worker", b"--layout", b"tp2"]
    assert b"WARM" not in line
    assert marked_processes(child.mark, "1") == [child.pid]
    assert marked_processes(warm.mark, "1") == [warm.pid]


def test_descriptors_come_along_and_are_told_by_name(made: Warm) -> None:
    warm = ready(made.start())
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours:
        with its:
            made.fork(warm, "returns", {"LINE": its.fileno()})
        ours.settimeout(SOON_S)
        assert ours.recv(100) == b"hello"
        assert ours.recv(100) == b""  # the warm process does not hold the other end open


def test_something_to_select_on_that_is_readable_at_the_end(made: Warm) -> None:
    child = made.fork(ready(made.start()))
    made.note()
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        assert selector.select(0.0) == []
        assert child.exit_code() is None
        child.send_signal(signal.SIGKILL)
        assert selector.select(SOON_S)
    assert child.exit_code() == 128 + signal.SIGKILL
    assert child.how() == "signal 9"
    child.send_signal(signal.SIGTERM)  # to nobody


@pytest.mark.parametrize(("then", "code"), [("fails", 1), ("returns", 0), ("5", 5)])
def test_how_its_work_ends_is_how_it_ends(made: Warm, then: str, code: int) -> None:
    warm = ready(made.start())
    assert made.fork(warm, then).wait(SOON_S) == code
    assert ("ValueError: no" in made.log.read_text()) == (then == "fails")
    assert warm.exit_code() is None


def test_a_group_of_its_own_and_ignored_signals(made: Warm) -> None:
    warm = ready(made.start(ignored=(signal.SIGTERM, signal.SIGUSR1)))
    child = made.fork(warm, apart="group")
    note = made.note()
    assert note["group"] == child.pid
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(child.pid, signum)
    assert not ends(child.pid, 0.3)
    child.send_signal(signal.SIGHUP)
    assert child.wait(SOON_S) == 128 + signal.SIGHUP


def test_all_that_it_has_started_ends_with_it_and_the_warm_process_does_not(made: Warm) -> None:
    warm = ready(made.start())
    mark = new_mark()
    first = made.fork(warm, "has a child", mark=mark)
    grandchild = made.note()["child"]
    second, other = made.fork(warm, mark=mark), made.fork(warm)
    assert first.end(0.0)
    assert ends(grandchild)
    assert ends(second.pid)  # which has the same mark
    assert warm.exit_code() is None
    assert other.exit_code() is None


def test_a_warm_process_that_is_killed_takes_no_worker_with_it(made: Warm) -> None:
    warm = ready(made.start())
    child = made.fork(warm)
    made.note()
    warm.send_signal(signal.SIGKILL)
    assert warm.wait(SOON_S) == 128 + signal.SIGKILL
    assert not ends(child.pid, 0.3)
    with pytest.raises(ForkRefused, match="the warm one: "):
        made.fork(warm)
    assert warm.hear()


def test_a_log_that_cannot_be_opened_is_no_fault_of_the_warm_process(made: Warm) -> None:
    warm = ready(made.start())
    made.log.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        made.fork(warm)
    made.log.rmdir()
    made.fork(warm)
    made.note()


def test_ending_the_warm_process_ends_no_worker(made: Warm) -> None:
    warm = ready(made.start())
    child = made.fork(warm)
    made.note()
    warm.end(0.0)
    assert warm.exit_code() == 128 + signal.SIGKILL
    assert not ends(child.pid, 0.3)


def test_nor_one_that_it_has_forked_just_now(made: Warm) -> None:
    """Which is not shown as another one yet; and may go on, as the next one was answered for."""
    warm = ready(made.start("shows late"))
    child, _ = made.fork(warm), made.fork(warm)
    assert child.pid in marked_processes(warm.mark, "1")
    assert warm.end(0.0) == [warm.pid]
    shown = Deadline.after(SystemClock(), SOON_S, "it to be shown")
    poll_until(lambda: child.pid not in marked_processes(warm.mark, "1"), shown)
    assert child.exit_code() is None
    assert warm.end(0.0) == []


def test_what_its_imports_have_started_ends_with_one_that_has_forked_nothing(made: Warm) -> None:
    warm = ready(made.start("has a helper"))
    (helper,) = {*marked_processes(warm.mark, "1")} - {warm.pid}
    warm.end(0.0)
    assert ends(helper)


def test_one_with_a_second_thread_refuses_and_goes_on(made: Warm) -> None:
    warm = ready(made.start("has a thread"))
    for _ in range(2):
        with pytest.raises(ForkRefused, match="the warm one: it has 2 threads"):
            made.fork(warm)


def test_one_that_could_not_import_says_why(made: Warm) -> None:
    warm = made.start("refuses")
    assert select.select([warm.line], [], [], SOON_S)[0]
    assert warm.hear() == "ConfigError: no such recipe"
    assert not warm.ready
    assert warm.hear() == "it has ended"


def test_one_that_stands_still_is_not_waited_for_forever(
    made: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = ready(made.start())
    warm.line.settimeout(0.3)
    warm.send_signal(signal.SIGSTOP)
    with pytest.raises(ForkRefused, match="timed out"):
        made.fork(warm)


def test_when_the_parent_is_killed_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        warm, forked = map(int, parent.stdout.readline().split())
        parent.kill()
        assert ends(warm)
        assert ends(forked)


def test_what_is_forked_does_nothing_where_nobody_knows_of_it(made: Warm) -> None:
    """Whoever asked has gone on without it, and would have two."""
    warm = ready(made.start())
    warm.line.settimeout(0.1)
    warm.send_signal(signal.SIGSTOP)
    with pytest.raises(ForkRefused):
        made.fork(warm)
    warm.line.close()
    others = psutil.Process().children()
    with warm_module._taking_orphans_in():
        warm.send_signal(signal.SIGCONT)
        assert ends(warm.pid)
        forked = [each for each in psutil.Process().children() if each not in others]
        assert [each.wait(SOON_S) for each in forked] == [1]
    assert not (made.directory / "note").exists()
