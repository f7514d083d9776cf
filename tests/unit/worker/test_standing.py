"""Where the main thread stands is read from its stack, and whether it waits for others there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from liver_hpc.worker.standing import Standing, main_thread_stands


def where_it_is(stand: Callable[[Callable[[], object]], None], name: str) -> Standing:
    """What another thread sees while the main thread is held in `stand`, in a function `name`."""
    lock, seen = threading.Lock(), list[Standing]()
    lock.acquire()

    def look() -> None:
        while not (seen and seen[-1].text.split(" < ")[0].endswith(f" in {name}")):
            seen.append(main_thread_stands())
        lock.release()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    stand(lock.acquire)
    thread.join()
    return seen[-1]


def reads_data(hold: Callable[[], object]) -> None:
    hold()


@pytest.mark.timeout(30)
def test_the_innermost_functions_are_named() -> None:
    stands = where_it_is(reads_data, "reads_data")
    places = stands.text.split(" < ")
    assert places[0].startswith("test_standing.py:")
    assert [place.rpartition(" ")[2] for place in places[:2]] == ["reads_data", "where_it_is"]
    assert len(places) == 3
    assert not stands.waits


@pytest.mark.timeout(30)
def test_who_is_in_a_collective_waits() -> None:
    code = compile("def all_wait(hold):\n    hold()\n", dist.distributed_c10d.__file__, "exec")
    namespace: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(code, namespace)
    stands = where_it_is(namespace["all_wait"], "all_wait")
    assert stands.text.startswith("distributed_c10d.py:2 in all_wait < ")
    assert stands.waits
