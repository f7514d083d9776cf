"""A supervised child is started as it was asked for, and ends with everything it has started."""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host import child as child_module
from liver_hpc.host.child import EXIT_ORPHANED, Child, Command, Foreign, end_all, new_mark
from liver_hpc.host.marks import marked_processes
from liver_hpc.host.process import end_of, raise_descriptor_limit

pytestmark = pytest.mark.timeout(60)

SOON_S = 20.0

# The thread that asks for the child ends at once; the process sits there to be killed.
PARENT = """
import signal, sys, threading
from liver_hpc.host.child import Child, Command
how = signal.Signals(int(sys.argv[1])) if sys.argv[1] else None
def start():
    child = Child(Command("sleep", ["sleep", "60"], orphan_signal=how))
    print(child.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
threading.Event().wait()
"""


class Shell:
    """Starts shell scripts as children; `ended` at the end of the test."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "logs" / "child.log"
        self.children: list[Child] = []

    def __call__(self, script: str, **options: Any) -> Child:
        command = Command("a shell", ["sh", "-c", script], log=self.log, **options)
        self.children.append(Child(command))
        return self.children[-1]

    def says(self, *lines: str) -> None:
        """Returns once the log holds just these lines, and what a shell says of a killed sleep."""

        def said() -> bool:
            text = self.log.read_text(encoding="utf-8")
            return [line for line in text.split("\n")[:-1] if line != "Terminated"] == [*lines]

        poll_until(said, Deadline.after(SystemClock(), SOON_S, f"{lines} in {self.log}"))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    end_all(made.children, 0.0)


def living(child: Child) -> int:
    return len(marked_processes(child.mark, "1"))


def ends_within(pid: int, limit_s: float) -> bool:
    """Whether a process that is not ours to wait for ends."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


# ---- the start


def test_the_log_gets_all_that_a_child_prints_and_a_mark_is_all_that_its_environment_gets_new(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("KEPT", "yes")
    child = shell("echo $KEPT $SLURM_JOB_ID; echo no >&2; env | grep -c LIVER_CHILD; exit 7")
    assert child.wait(SOON_S) == 7
    shell.says("yes", "no", "1")
    assert (child.exit_code(), child.how()) == (7, "exit code 7")


def test_an_environment_that_is_given_is_taken_as_it_is(shell: Shell) -> None:
    shell("echo $SLURM_JOB_ID$HOME", environment={"SLURM_JOB_ID": "7"}).wait(SOON_S)
    shell.says("7")


def test_pipes_and_the_log_side_by_side(shell: Shell) -> None:
    child = shell(
        "read word; echo got $word; echo aside >&2; cat",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdin.write("a word\n")
    child.stdin.close()
    with child.stdout as said:
        assert said.read() == "got a word\n"
    assert child.wait(SOON_S) == 0
    shell.says("aside")


def test_descriptors_are_handed_down(shell: Shell) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as said:
        shell(f"echo through >/proc/self/fd/{writer}", pass_fds=(writer,)).wait(SOON_S)
        os.close(writer)
        assert said.read() == "through\n"


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(LiverError, match=r"agent a0 cannot be started: .* 'no-such-thing'"):
        Child(Command("agent a0", ["no-such-thing", "x"]))


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LiverError, match=r"agent a0 cannot be started: .*file"):
        Child(Command("agent a0", ["true"], log=tmp_path / "file" / "log"))


def test_a_log_makes_no_run_directory_again_that_was_removed(tmp_path: Path) -> None:
    """It may come back, and another one would be in its place."""
    with pytest.raises(LiverError, match=r"agent a0 cannot be started: .*logs"):
        Child(Command("agent a0", ["true"], log=tmp_path / "run" / "logs" / "agent-a0.log"))
    assert not (tmp_path / "run").exists()


def test_an_ignored_signal_does_nothing_from_the_first_instruction_on(shell: Shell) -> None:
    child = shell("grep SigIgn /proc/self/status; exit 3", ignored=(signal.SIGTERM, signal.SIGUSR1))
    child.send_signal(signal.SIGTERM)  # in the guard, as a rule
    assert child.wait(SOON_S) == 3
    mask = int(shell.log.read_text(encoding="utf-8").split()[1], 16)
    wanted = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGUSR1 - 1)
    assert mask & wanted == wanted
    assert not mask & 1 << (signal.SIGUSR2 - 1)


def test_no_signal_is_blocked_and_one_that_comes_at_once_ends_the_child(shell: Shell) -> None:
    shell("grep SigBlk /proc/self/status").wait(SOON_S)
    shell.says("SigBlk:\t0000000000000000")
    child = shell("sleep 60")
    child.send_signal(signal.SIGTERM)
    assert child.wait(SOON_S) == 128 + signal.SIGTERM
    assert child.how() == "signal 15"


def test_a_forked_process_starts_children_of_its_own(shell: Shell) -> None:
    shell("exit 0").wait(SOON_S)  # now there is a thread that the fork leaves behind
    forked = os.fork()
    if forked == 0:
        os._exit(Child(Command("a shell", ["sh", "-c", "exit 5"])).wait(SOON_S))
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 5


# ---- the parent's end


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_the_process_and_not_with_the_thread_that_started_it(
    signum: signal.Signals,
) -> None:
    command = [sys.executable, "-c", PARENT, str(int(signum))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not ends_within(child, 0.5)
        parent.kill()
        assert ends_within(child, SOON_S)


def test_a_child_without_an_orphan_signal_outlives_the_process() -> None:
    command = [sys.executable, "-c", PARENT, ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(SOON_S)
        assert not ends_within(child, 0.5)
        os.kill(child, signal.SIGKILL)
        assert ends_within(child, SOON_S)


def test_a_command_whose_parent_has_ended_before_it_began_is_not_executed() -> None:
    nobody = "0"
    words = [sys.executable, "-I", "-S", "-c", child_module._GUARD, nobody, "9", "", "/bin/true"]
    assert subprocess.run(words, timeout=SOON_S).returncode == EXIT_ORPHANED


def test_what_starts_too_late_to_be_waited_for_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, popen = SimpleQueue[Any](), child_module._popen

    def late(command: Command) -> Any:
        threading.Event().wait(0.3)
        begun.put(process := popen(command))
        return process

    monkeypatch.setattr(child_module, "_popen", late)
    monkeypatch.setattr(child_module, "_START_S", 0.05)
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for sleeper to start"):
        Child(Command("sleeper", ["sleep", "60"]))
    assert begun.get(timeout=SOON_S).wait(SOON_S) == -signal.SIGKILL


def test_a_process_that_finds_another_parent_exits_at_once() -> None:
    script = "from liver_hpc.host.child import end_with_parent; end_with_parent(1)"
    assert subprocess.run([sys.executable, "-c", script], timeout=SOON_S).returncode == (
        EXIT_ORPHANED
    )


# ---- its own end


def test_a_selector_tells_of_the_end(shell: Shell) -> None:
    child = shell("read word", stdin=subprocess.PIPE)
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        assert selector.select(0.0) == []
        child.stdin.close()
        assert len(selector.select(SOON_S)) == 1
    assert child.exit_code() == 1


def test_a_wait_ends_at_its_deadline_and_says_for_whom(shell: Shell) -> None:
    child = shell("sleep 60")
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for a shell to end"):
        child.wait(0.05)
    assert (child.exit_code(), child.how()) == (None, "still running")


def test_end_lets_a_child_end_by_itself(shell: Shell) -> None:
    child = shell("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done")
    shell.says("up")
    assert child.end(SOON_S) == []
    assert child.wait(0.0) == 3
    shell.says("up", "bye")


def test_end_takes_another_signal_first(shell: Shell) -> None:
    child = shell("trap '' TERM; trap 'exit 4' HUP; echo up; while :; do sleep 0.05; done")
    shell.says("up")
    child.end(SOON_S, signal.SIGHUP)
    assert child.wait(0.0) == 4


def test_end_kills_the_whole_tree_of_one_that_does_not_listen(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    child = shell(
        "trap '' TERM; (setsid sleep 61 &); sleep 62 & echo up; while :; do sleep 63; done"
    )
    shell.says("up")
    poll_until(lambda: living(child) == 4, Deadline.after(SystemClock(), SOON_S, "the tree"))
    # The shell itself has been killed before the tree is looked for.
    assert len(child.end(0.2)) >= 3
    assert "a shell has not ended 0.2 s after SIGTERM" in caplog.text
    assert child.wait(0.0) == 128 + signal.SIGKILL
    assert living(child) == 0


def test_end_kills_what_a_child_has_left_behind(shell: Shell) -> None:
    child = shell("setsid sleep 61 & exit 0")
    assert child.wait(SOON_S) == 0
    assert living(child) == 1
    assert len(child.end(SOON_S)) == 1
    assert living(child) == 0
    assert child.end(SOON_S) == []


def test_a_group_of_its_own_gets_a_signal_as_a_whole_and_a_child_in_ours_alone(
    shell: Shell,
) -> None:
    below = "trap 'echo both; exit' TERM; echo up; while :; do sleep 0.05; done"
    script = f'trap "exit 3" TERM; sh -c "{below}" & wait'
    group = shell(script, apart="group")
    shell.says("up")
    group.send_signal(signal.SIGTERM)
    assert group.wait(SOON_S) == 3
    shell.says("up", "both")
    alone = shell(script)
    shell.says("up", "both", "up")
    alone.send_signal(signal.SIGTERM)
    assert alone.wait(SOON_S) == 3
    assert living(alone) >= 1
    shell.says("up", "both", "up")


def test_a_child_that_does_not_lead_its_group_yet_gets_a_signal_all_the_same(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was forked just now."""

    def no_group(_group: int, _signum: int) -> None:
        raise ProcessLookupError

    child = shell("sleep 60", apart="group")
    monkeypatch.setattr("os.killpg", no_group)
    child.send_signal(signal.SIGTERM)
    assert child.wait(SOON_S) == 128 + signal.SIGTERM


def test_a_session_of_its_own_is_led_by_the_child(shell: Shell) -> None:
    child = shell("read word", apart="session", stdin=subprocess.PIPE)
    assert os.getsid(child.pid) == child.pid


def test_children_end_within_one_limit(shell: Shell) -> None:
    mark = new_mark()
    deaf = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    children = [shell(deaf, mark=mark) for _ in range(3)]
    shell.says("up", "up", "up")
    clock = SystemClock()
    began_s = clock.now_s()
    end_all(children, 1.0)
    assert 1.0 <= clock.now_s() - began_s < 2.9
    assert [child.how() for child in children] == ["signal 9"] * 3


def test_end_closes_what_this_side_holds(shell: Shell) -> None:
    before = len(os.listdir("/proc/self/fd"))
    child = shell("sleep 60", stdin=subprocess.PIPE)
    child.fileno()
    child.end(0.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_can_be_waited_for_in_one_thread_and_ended_in_another(shell: Shell) -> None:
    child = shell("sleep 60")
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(child.wait()))
    waiter.start()
    child.end(SOON_S)
    waiter.join(SOON_S)
    assert codes == [128 + signal.SIGTERM]


def test_a_process_that_was_adopted_holds_no_descriptor_once_nobody_has_it() -> None:
    with subprocess.Popen(["true"]) as process:
        adopted = Foreign(process.pid)
        number = adopted._end
        os.fstat(number)
        del adopted
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_two_threads_may_wait_for_a_process_that_was_adopted() -> None:
    """Its descriptor is closed once: the number may be another thread's by then."""
    errors: list[BaseException] = []

    def wait(process: Foreign) -> None:
        try:
            assert process.wait(SOON_S) == -signal.SIGKILL
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            errors.append(error)

    for _ in range(30):
        with subprocess.Popen(["sleep", "60"]) as child:
            process = Foreign(child.pid)
            threads = [threading.Thread(target=wait, args=(process,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            child.kill()
            for thread in threads:
                thread.join()
    assert errors == []


def test_a_process_is_adopted_by_one_that_has_thousands_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raise_descriptor_limit()

    def high_end_of(pid: int) -> int:
        end = end_of(pid)
        try:
            return fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1500)
        finally:
            os.close(end)

    monkeypatch.setattr(child_module, "end_of", high_end_of)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            process = Foreign(child.pid)
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
        finally:
            child.kill()
        assert process.wait(SOON_S) == -signal.SIGKILL
