"""Agents and their launchers: workers start, get their ids, and end with their agent."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from contextlib import suppress

import pytest

from liver_hpc.cluster.launcher import EXIT_UNHEALTHY, KILLED, Launcher, last_words, local_launcher
from liver_hpc.errors import LiverError
from liver_hpc.host.version import version_fault
from liver_hpc.layout.coordinates import Layout
from liver_hpc.node.launch import EXIT_BOOT, EXIT_FAILED, EXIT_NOT_MET
from liver_hpc.rendezvous.base import Identity, Refusal
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from tests.fakes import fewer
from tests.integration.agents import Run, request, wait_for
from tests.memory_launcher import MemoryLauncher

pytestmark = pytest.mark.timeout(60)

# ---- every launcher


@pytest.fixture(params=["memory", "local"])
def launcher(request: pytest.FixtureRequest, run: Run) -> Launcher:
    return MemoryLauncher() if request.param == "memory" else run.launcher("never boots")


def test_launched_agents_live_until_they_are_killed(launcher: Launcher, run: Run) -> None:
    launcher.launch(request("a0"))
    launcher.launch(request("a1"))
    assert launcher.alive("a0")
    assert launcher.exit_code("a0") is None
    launcher.kill("a0")
    launcher.kill("a0")
    assert run.wait_ended(launcher) != 0
    assert launcher.alive("a1")
    launcher.close()
    assert not launcher.alive("a1")
    launcher.close()


def test_a_name_is_launched_once(launcher: Launcher, run: Run) -> None:
    launcher.launch(request("a0"))
    with pytest.raises(LiverError, match="agent 'a0' was launched before"):
        launcher.launch(request("a0"))
    launcher.kill("a0")
    run.wait_ended(launcher)
    with pytest.raises(LiverError, match="agent 'a0' was launched before"):
        launcher.launch(request("a0"))


def test_unknown_agents_are_errors(launcher: Launcher) -> None:
    for question in (launcher.alive, launcher.exit_code, launcher.kill):
        with pytest.raises(LiverError, match="'ghost' was never launched"):
            question("ghost")


def test_nothing_is_launched_after_close(launcher: Launcher) -> None:
    launcher.close()
    with pytest.raises(LiverError, match="closed"):
        launcher.launch(request())


def test_memory_launcher_starts_and_ends_agents_as_told() -> None:
    started: list[LaunchAgent] = []
    launcher = MemoryLauncher(started.append)
    launcher.launch(request("a0"))
    launcher.launch(request("a1"))
    assert started == [request("a0"), request("a1")]
    launcher.end("a0", 3)
    launcher.end("a0", 4)
    launcher.kill("a1")
    assert (launcher.exit_code("a0"), launcher.exit_code("a1")) == (3, KILLED)


# ---- an agent's life


def test_an_agent_of_another_release_ends_before_it_starts_a_worker(run: Run) -> None:
    run.open_rendezvous()
    (run.directory / "run.yaml").write_text("a_key_of_its_time: 1\n")
    launcher = run.launcher("ends", options=["--version", "0.0.1"])
    launcher.launch(request())
    assert run.wait_ended(launcher) == EXIT_FAILED
    assert last_words(run.directory, "a0") == version_fault("0.0.1", "its coordinator")
    assert [*(run.directory / "logs").glob("worker-*")] == []


def test_workers_get_their_ids_their_environment_and_their_logs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PMI_RANK", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    run.open_rendezvous()
    launcher = run.launcher("ends")
    launcher.launch(request())
    for rank, note in enumerate(run.notes()):
        assert note["told"] == {"worker": 4 + rank, "host": run.control[0]}
        environment = note["environment"]
        assert isinstance(environment, dict)
        assert environment["LIVER_LOCAL_RANK"] == str(rank)
        assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("1", "3")
        assert environment["SLURM_CONF"] == "/etc/slurm.conf"
        foreign = ("PMI", "SLURM_JOB")
        assert [name for name in environment if name.startswith(foreign)] == []
        assert run.log(f"worker-a0-{rank}") == "at work\n"
    assert run.wait_ended(launcher) == 1  # worker 1 ends with 1, worker 0 with 0
    log = run.log("agent-a0")
    assert "[agent a0] met the rendezvous: workers [4, 5]" in log
    assert "worker 5 ended: exit code 1" in log


@pytest.mark.parametrize("limit", [resource.RLIMIT_NPROC, resource.RLIMIT_CPU])
def test_workers_may_have_as_many_threads_and_as_much_cpu_time_as_the_node_allows(
    run: Run, limit: int
) -> None:
    run.open_rendezvous()
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (fewer(hard), hard))
    try:
        run.launcher("works").launch(request(workers=1))
        (note,) = run.notes((0,))
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert isinstance(note["pid"], int)
    assert resource.prlimit(note["pid"], limit) == (hard, hard)


def test_a_node_is_checked_before_anything_starts_there(run: Run) -> None:
    run.set_cluster(
        health_check=f"test -e {run.directory}/well || {{ echo 'GPU 3 has fallen off'; exit 9; }}"
    )
    run.open_rendezvous()
    launcher = run.launcher("ends")
    launcher.launch(request())
    assert run.wait_ended(launcher) == EXIT_UNHEALTHY
    said = last_words(run.directory, "a0")
    assert "fails its health check (exit code 9): GPU 3 has fallen off; see logs/health-a0" in said
    assert run.notes(()) == []
    (run.directory / "well").touch()
    launcher.launch(request("a1"))
    assert [note["told"]["worker"] for note in run.notes()] == [4, 5]  # type: ignore[index]
    assert run.wait_ended(launcher, "a1") == 1


def test_workers_that_share_fewer_cpus_than_they_are_are_noted(run: Run) -> None:
    run.set_cluster(kind="slurm")
    cpus, threads = os.sched_getaffinity(0), [*map(int, os.listdir("/proc/self/task"))]

    def use(some: set[int]) -> None:
        for thread in threads:  # one of them starts all children
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, some)

    use({min(cpus)})
    try:
        run.launcher("ends").launch(request())
    finally:
        use(cpus)
    log = run.directory / "logs" / "agent-a0.log"
    said = "2 workers share 1 CPUs: cpus_per_node asks for more"
    wait_for(lambda: log.exists() and said in log.read_text(), "the agent's warning")


def test_workers_take_the_slots_that_they_are_given(run: Run) -> None:
    run.open_rendezvous()
    launcher = run.launcher("ends")
    launcher.launch(LaunchAgent("a0", Seat("", (5, 2)), Layout(1, 1, 2)))
    assert [note["told"]["worker"] for note in run.notes((5, 2))] == [4, 5]  # type: ignore[index]
    assert run.wait_ended(launcher) == 5


def test_the_rendezvous_learns_who_the_agent_is(run: Run) -> None:
    seen: list[Identity] = []

    def refuse(who: Identity) -> Refusal:
        seen.append(who)
        return Refusal(reason="not expected")

    run.rendezvous.start(refuse)
    launcher = run.launcher("works")
    launcher.launch(request("burst-2", workers=3))
    assert run.wait_ended(launcher, "burst-2") == EXIT_NOT_MET
    assert [(who.agent, who.workers, who.host) for who in seen] == [
        ("burst-2", 3, socket.gethostname())
    ]
    assert "agent burst-2 was refused: not expected" in run.log("agent-burst-2")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("boot fails", "worker 1 of agent a0 ended in boot (exit code 3)"),
        ("boot is refused", "worker 1 of agent a0 failed in boot: PlanError: no (exit code 1)"),
        ("talks", "worker 1 of agent a0 failed in boot: hello there (still running)"),
    ],
)
def test_a_worker_that_fails_in_boot_fails_the_agent_which_says_who(
    run: Run, then: str, said: str
) -> None:
    launcher = run.launcher(then)
    launcher.launch(request())
    assert run.wait_ended(launcher) == EXIT_BOOT
    assert said in run.log("agent-a0")
    assert str(run.directory / "logs" / "worker-a0-1.log") in run.log("agent-a0")
    assert run.alive() == []


def test_an_agent_says_why_its_worker_refused_to_boot(run: Run) -> None:
    run.set_network(interface="nope0")
    launcher = local_launcher(run.directory)
    run.launchers.append(launcher)
    launcher.launch(request(workers=1))
    assert run.wait_ended(launcher) == EXIT_BOOT
    wanted = "worker 0 of agent a0 failed in boot: ConfigError: network.interface: node"
    assert wanted in last_words(run.directory, "a0")
    assert "has no interface 'nope0'" in last_words(run.directory, "a0")


def test_a_worker_that_boots_too_slowly_fails_the_agent(run: Run) -> None:
    run.set_deadline("boot_s", 0.3)
    launcher = run.launcher("never boots")
    launcher.launch(request())
    assert run.wait_ended(launcher) == EXIT_BOOT
    assert "waited 0.3 s for workers [0, 1] of agent a0 to boot" in run.log("agent-a0")


def test_one_workers_death_does_not_touch_the_others(run: Run) -> None:
    run.open_rendezvous()
    launcher = run.launcher("works")
    launcher.launch(request(workers=3))
    first, second, third = (note["pid"] for note in run.notes((0, 1, 2)))
    assert isinstance(second, int)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: "worker 5 ended: signal 9" in run.log("agent-a0"), "the agent to notice")
    assert {first, third} <= set(run.alive())
    assert launcher.alive("a0")
    for pid in (first, third):
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGINT)
    assert run.wait_ended(launcher) == KILLED  # the worst of two ends


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_told_to_stop_ends_its_workers_and_says_so(
    run: Run, signum: signal.Signals
) -> None:
    run.open_rendezvous()
    launcher = run.launcher("works")
    launcher.launch(request())
    run.notes()
    (agent,) = run.agents()
    os.kill(agent, signum)
    assert run.wait_ended(launcher) == 128 + signum
    assert f"stopped by {signum.name}: ending worker 4, worker 5" in run.log("agent-a0")


def test_a_worker_that_ignores_sigterm_is_killed_after_its_deadline(run: Run) -> None:
    launcher = run.launcher("stubborn", exit_s=10.0)
    launcher.launch(request())
    wait_for(lambda: len(run.boots()) == 2, "workers to start")
    launcher.kill("a0")
    assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    assert "worker 1 of agent a0 has not ended 1 s after SIGTERM" in run.log("agent-a0")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.3])
def test_an_agent_killed_while_it_starts_ends_at_once(run: Run, delay_s: float) -> None:
    launcher = run.launcher("never boots", exit_s=30.0)
    launcher.launch(request())
    time.sleep(delay_s)
    launcher.kill("a0")
    wait_for(lambda: not launcher.alive("a0"), "the agent to end", 10.0)
    assert run.alive() == []


def test_an_agent_that_does_not_end_is_killed_by_its_launcher(run: Run) -> None:
    launcher = run.launcher("never boots", exit_s=0.5)
    launcher.launch(request())
    wait_for(lambda: len(run.boots()) == 2, "workers to start")
    (agent,) = run.agents()
    os.kill(agent, signal.SIGSTOP)
    launcher.close()
    assert run.alive() == []
