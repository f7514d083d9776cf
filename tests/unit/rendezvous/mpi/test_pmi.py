"""PMI-1 as text, and the thread that speaks it over a socketpair."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.rendezvous.mpi.pmi import (
    MAX_LINE_BYTES,
    PmiError,
    PmiServer,
    serve,
    shared_memory_of,
)


@pytest.fixture
def pmi() -> PmiServer:
    return PmiServer()


def ask(pmi: PmiServer, line: str) -> str:
    return pmi.answer(f"{line}\n").removesuffix("\n")


# ---- what MPICH says in its life


def test_a_process_is_told_that_it_is_alone_in_a_world_of_its_own(pmi: PmiServer) -> None:
    said = ask(pmi, "cmd=init pmi_version=1 pmi_subversion=1")
    assert said == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    said = ask(pmi, "cmd=get_maxes")
    assert re.fullmatch(r"cmd=maxes rc=0 kvsname_max=(\d+) keylen_max=(\d+) vallen_max=(\d+)", said)
    assert ask(pmi, "cmd=get_appnum") == "cmd=appnum rc=0 appnum=0"
    assert ask(pmi, "cmd=get_universe_size") == "cmd=universe_size rc=0 size=1"
    assert ask(pmi, "cmd=get_my_kvsname") == f"cmd=my_kvsname rc=0 kvsname={pmi.world}"
    assert ask(pmi, "cmd=barrier_in") == "cmd=barrier_out rc=0"
    assert ask(pmi, "cmd=finalize") == "cmd=finalize_ack rc=0"


def test_no_two_worlds_have_one_name() -> None:
    names = {PmiServer().world for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"liver_[0-9a-f]{16}", name) for name in names)


def test_another_version_is_refused(pmi: PmiServer) -> None:
    assert ask(pmi, "cmd=init pmi_version=2 pmi_subversion=0").endswith("rc=-1")


def test_a_process_that_aborts_waits_for_no_reply(pmi: PmiServer) -> None:
    assert pmi.answer("cmd=abort exitcode=3\n") == ""


@pytest.mark.parametrize("command", ["spawn", "publish_name", "lookup_name", "mcmd"])
def test_what_is_not_known_is_refused_by_its_name(pmi: PmiServer, command: str) -> None:
    said = ask(pmi, f"cmd={command} service=x")
    assert said == f"cmd={command}_result rc=-1 msg=not_supported"


# ---- the key-value store


def test_what_is_put_can_be_got(pmi: PmiServer) -> None:
    world = pmi.world
    assert ask(pmi, f"cmd=put kvsname={world} key=card value=a=b c%20") == (
        "cmd=put_result rc=0 msg=success"
    )
    assert ask(pmi, f"cmd=get kvsname={world} key=card") == (
        "cmd=get_result rc=0 msg=success value=a=b c%20"
    )


def test_an_unknown_key_is_said_to_be_unknown(pmi: PmiServer) -> None:
    said = ask(pmi, f"cmd=get kvsname={pmi.world} key=PMI_hwloc_xmlfile")
    assert said == "cmd=get_result rc=-1 msg=key_not_found value=unknown"


def test_there_is_no_other_store_than_its_own(pmi: PmiServer) -> None:
    assert "rc=-1" in ask(pmi, "cmd=put kvsname=other key=k value=v")
    ask(pmi, f"cmd=put kvsname={pmi.world} key=k value=v")
    assert "rc=-1" in ask(pmi, "cmd=get kvsname=other key=k")


# ---- lines


@pytest.mark.parametrize(
    "line",
    ["", "hello", "cmd=", "cmd==", "key=value", "cmd=a/../b", "cmd=get key=\xff", "\0" * 9],
)
def test_garbage_ends_the_conversation(pmi: PmiServer, line: str) -> None:
    with pytest.raises(PmiError, match="not a line of PMI-1"):
        pmi.answer(line + "\n")


def test_a_line_that_does_not_end_ends_the_conversation(pmi: PmiServer) -> None:
    with pytest.raises(PmiError, match="not a line of PMI-1"):
        pmi.answer("cmd=get_maxes x=yy")


@given(st.lists(st.text(max_size=80)))
def test_whatever_comes_is_answered_in_whole_lines_or_refused(lines: list[str]) -> None:
    pmi = PmiServer()
    for line in lines:
        try:
            said = pmi.answer(f"cmd={line}\n")
        except PmiError:
            continue
        assert said == "" or (said.startswith("cmd=") and said.index("\n") == len(said) - 1)


def test_the_name_of_mpichs_segment_is_the_hash_of_the_world() -> None:
    """As seen with MPICH 5.0.2; with the real one in tests/integration/test_meeting.py."""
    assert str(shared_memory_of("liver_08647b19099ab4db")) == "/dev/shm/mpich_shm_4ab8fd58_0"


# ---- over a socketpair


def served() -> tuple[socket.socket, threading.Thread]:
    mine, theirs = socket.socketpair()
    theirs.settimeout(5.0)
    thread = threading.Thread(target=serve, args=(PmiServer(), mine))
    thread.start()
    return theirs, thread


def test_a_process_is_answered_until_it_has_ended() -> None:
    process, thread = served()
    with process:
        process.sendall(b"cmd=get_appnum\n")
        assert process.recv(100) == b"cmd=appnum rc=0 appnum=0\n"
    thread.join(5.0)
    assert not thread.is_alive()


def test_lines_may_come_in_pieces_and_together() -> None:
    process, thread = served()
    with process:
        for piece in (b"cmd=get_app", b"num\ncmd=barrier_in\ncmd=get_un", b"iverse_size\n"):
            process.sendall(piece)
        said = b""
        while said.count(b"\n") < 3:
            said += process.recv(100)
        replies = (b"cmd=appnum rc=0 appnum=0", b"cmd=barrier_out rc=0")
        assert said.split(b"\n") == [*replies, b"cmd=universe_size rc=0 size=1", b""]
    thread.join(5.0)


def test_who_talks_without_end_is_hung_up_on() -> None:
    process, thread = served()
    with process:
        process.sendall(b"cmd=get_maxes x=" + b"y" * MAX_LINE_BYTES)
        with contextlib.suppress(ConnectionResetError):
            assert process.recv(100) == b""
    thread.join(5.0)
    assert not thread.is_alive()


def test_who_talks_no_pmi_is_hung_up_on() -> None:
    process, thread = served()
    with process:
        process.sendall(b"GET / HTTP/1.1\n")
        assert process.recv(100) == b""
    thread.join(5.0)
