"""The warm process of a node, which forks its workers: `python -m liver_hpc.worker.warm`.

The node's agent starts it. It imports what a worker imports, once for all workers of the node, and
serves the agent (`host/forking.py`) until that ends. It opens no device: CUDA does not survive a
fork. So whether there is any, and whether what was imported has left it alone, is found out in
children that are thrown away. On a CPU such a child boots as a worker does and rehearses: what that
has imported is imported here, too, and no worker that is forked needs to rehearse for it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from liver_hpc.config.load import load_run
from liver_hpc.errors import LiverError, told_of
from liver_hpc.host.child import end_with_parent
from liver_hpc.host.forking import serve
from liver_hpc.host.process import collector_paused
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.base import load_recipe, put_first_on_path
from liver_hpc.worker import main as worker
from liver_hpc.world.code import imported_code

_CHILD_S = 60
# What is imported only once a model is built, or an optimizer; and by the first handoff.
_LATER = (
    "torch._dynamo",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "liver_hpc.recipes.local_layers",
    "liver_hpc.recipes.samples",
)


def main() -> NoReturn:
    """Imports, and forks until the agent has gone; says so where it cannot."""
    parser = argparse.ArgumentParser(prog="liver_hpc.worker.warm", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--layout", required=True, help="layout to rehearse, as tp2 pp1 dp2")
    parser.add_argument("line", type=int, help="a descriptor: the line to the agent")
    options = parser.parse_args()
    line = socket.socket(fileno=options.line)
    try:
        _import(options.run_directory, Layout.parse(options.layout))
    except Exception as error:
        line.send(told_of(error).encode(errors="replace"))
        raise
    serve(line, _work)


def _import(run_directory: Path, layout: Layout) -> None:
    before = _read_from()
    config = load_run(run_directory / "run.yaml")  # which imports a recipe's options
    put_first_on_path(config)
    imported_code(config.recipe)
    worker.quieten()
    with collector_paused():
        import torch  # noqa: F401 - for those that are forked

        has_cuda = _in_a_child(_has_cuda)
        if not has_cuda:
            from liver_hpc.world.device import open_device

            open_device(0)  # before megatron is imported: it brings the stand-in for CUDA
        with _knowing_of_cuda(has_cuda):
            if has_cuda:
                from liver_hpc.world.device import allow_concurrent_compile, compile_in_private

                allow_concurrent_compile()
                compile_in_private()
            import liver_hpc.worker.control  # noqa: F401

            load_recipe(config)
            for module in _LATER:
                importlib.import_module(module)
        if has_cuda and not _in_a_child(_opens_cuda):
            raise LiverError("what was imported has used CUDA: a forked process cannot open it")
        handoff = config.handoff
        if not has_cuda and handoff.warm_up and not handoff.warm_up_again:
            _import_as_rehearsed(run_directory, layout)
    if opened := sorted(_read_from() - before):
        raise LiverError(
            f"the recipe, or what it imports, has opened {opened[0]} as it was imported, and each "
            "forked worker would move where the others read on: it is to be opened in `open`"
        )


@contextlib.contextmanager
def _knowing_of_cuda(has_cuda: bool) -> Iterator[None]:
    """Torch answers at once whether there is CUDA: modules ask as they are imported, and otherwise
    it would ask the driver, which starts a thread and opens CUDA here."""
    import torch

    ask, torch.cuda.is_available = torch.cuda.is_available, lambda: has_cuda
    try:
        yield
    finally:
        torch.cuda.is_available = ask


def _import_as_rehearsed(run_directory: Path, layout: Layout) -> None:
    """Imports what a worker's boot does. Where that fails it does so in each worker, too, which can
    say why."""
    from liver_hpc.world import rehearsed

    with tempfile.TemporaryFile("w+") as told:

        def boot() -> bool:
            before = {*sys.modules}
            worker.boot(run_directory, layout)
            json.dump([name for name in sys.modules if name not in before], told)
            told.flush()
            return True

        try:
            if not _in_a_child(boot):
                raise LiverError("a child has not booted")
        except LiverError as error:
            print(f"{error}: each worker rehearses for itself", file=sys.stderr)
            return
        told.seek(0)
        for name in json.load(told):
            # Some are no modules of their own, but put there by others.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    rehearsed.remember_imports()


def _read_from() -> set[str]:
    """Files and sockets that this process has open to read from; where it stands in them, it shares
    with whatever is forked."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the list itself is closed by now
            mode, how = os.fstat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
            if stat.S_ISSOCK(mode) or (stat.S_ISREG(mode) and how != os.O_WRONLY):
                found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _in_a_child(ask: Callable[[], bool]) -> bool:
    """What a child finds that is thrown away; no where it fails. Raises LiverError where a signal
    ends it, as one does after _CHILD_S: a slow driver is not none."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        found = False
        try:
            end_with_parent(parent)
            signal.alarm(_CHILD_S)
            found = ask()
        finally:
            os._exit(0 if found else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        ended = f"{signal.Signals(-code).name} has ended the child that was to find out"
        raise LiverError(f"{ask.__name__}: {ended}; it has {_CHILD_S} s")
    return code == 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _opens_cuda() -> bool:
    import torch

    return torch.zeros(1, device="cuda").is_cuda


def _work(arguments: list[str]) -> NoReturn:
    """In a forked worker: what it draws at random must not be what the others draw."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    worker.main(arguments)


if __name__ == "__main__":
    main()
