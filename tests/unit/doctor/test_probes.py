"""Probes on this machine, and their lines as the asker reads them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.config.schema import NetworkSection
from liver_hpc.doctor import on_node
from liver_hpc.doctor.steps import Probe, ProbeFailed
from liver_hpc.errors import DeadlineError

LIMIT_S = 20.0
NETWORK = NetworkSection(interface="lo")


def probe(name: str, *arguments: str) -> Probe:
    words = [sys.executable, "-m", "liver_hpc.doctor.probe", name, *arguments]
    return Probe(words, f"the {name} probe")


def python(program: str) -> Probe:
    return Probe([sys.executable, "-c", program], "a program")


def facts(directory: Path, *names: str) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    on_node.tell_facts(lambda **fields: said.append(fields), directory, names, NETWORK)
    (only,) = said
    return only


def test_facts_are_plain_json_and_carry_the_askers_token(tmp_path: Path) -> None:
    (tmp_path / on_node.ASKERS_TOKEN).write_text("abc")
    told = json.loads(json.dumps(facts(tmp_path, "localhost", "no.such.host.invalid")))
    assert told["token"] == "abc"
    assert (tmp_path / told["host"]).read_text() == "abc"
    assert told["resolves"] == {"localhost": "127.0.0.1", "no.such.host.invalid": ""}
    assert (told["interface"], told["address"], told["trouble"]) == ("lo", "127.0.0.1", "")
    assert told["versions"] == on_node.versions()
    assert "none" not in told["versions"].values()


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    told = facts(tmp_path / "elsewhere")
    assert told["token"] == ""
    assert "No such file" in told["token_trouble"]


def test_a_lock_is_held_until_the_holder_is_told_to_end(tmp_path: Path) -> None:
    with probe("hold-lock", "--directory", str(tmp_path)) as holder:
        assert holder.say(LIMIT_S) == {"held": True}
        assert not on_node.try_lock(tmp_path)
    assert on_node.try_lock(tmp_path)


def test_two_clocks_of_one_machine_agree() -> None:
    network = NETWORK.model_dump_json()
    with probe("serve-clock", "--network", network) as server:
        where = server.say(LIMIT_S)
        asked = probe("compare-clock", "--host", where["host"], "--port", str(where["port"]))
        with asked:
            said = asked.say(LIMIT_S)
    assert abs(said["ahead_s"]) <= said["round_trip_s"] < 1.0


def test_a_probe_that_cannot_look_says_why(tmp_path: Path) -> None:
    with (
        probe("join", "--directory", str(tmp_path), "--limit-s", "0.2") as joiner,
        pytest.raises(ProbeFailed, match=r"the join probe: .*meeting"),
    ):
        joiner.say(LIMIT_S)


def test_what_else_is_printed_is_passed_over() -> None:
    with python("print('module loaded'); print('{\"a\": 1}'); print(7)") as noisy:
        assert noisy.say(LIMIT_S) == {"a": 1}
        with pytest.raises(ProbeFailed, match="exit code 0 and said nothing"):
            noisy.say(LIMIT_S)


def test_the_last_words_of_a_step_that_failed_are_told() -> None:
    program = "import sys; sys.exit('srun: error: Unable to create step')"
    with (
        python(program) as broken,
        pytest.raises(ProbeFailed, match="a program: srun: error: Unable to create step"),
    ):
        broken.say(LIMIT_S)


def test_a_silent_probe_has_a_deadline_and_is_ended() -> None:
    silent = python("import time; time.sleep(300)")
    with silent, pytest.raises(DeadlineError, match=r"waited 0.3 s for a program"):
        silent.say(0.3)
    assert silent._process.returncode == -signal.SIGTERM


def test_the_command_says_what_it_takes() -> None:
    words = [sys.executable, "-m", "liver_hpc", "doctor", "--help"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert "--nodes N" in printed
