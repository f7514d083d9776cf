"""A worker's process: `python -m liver_hpc.worker.main`, or forked from the node's `warm.py`.

It boots alone (imports, device, data, a rehearsed step), learns its id and the coordinator's
address from the agent, and then does what the control channel tells it: begin or join, train, hand
off, leave.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from liver_hpc.cluster.network import (
    NCCL_LOG,
    nccl_log_path,
    node_facts,
    worker_network_environment,
)
from liver_hpc.config.load import load_run
from liver_hpc.errors import told_of
from liver_hpc.host.affinity import bind_process, local_cpus, share_of_cpus
from liver_hpc.host.process import CORES, collector_paused, drop_unwritable_output, take_core
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.base import put_first_on_path
from liver_hpc.rendezvous.local import BOOTED, Way, WorkersEnd
from liver_hpc.worker.ranks import PLACE_VARIABLE
from liver_hpc.world.code import imported_code

if TYPE_CHECKING:
    from liver_hpc.worker.control import Worker

log = logging.getLogger(__name__)

EXIT_FAILED = 1


def main(arguments: list[str] | None = None) -> NoReturn:
    """Boots, reports to the agent, and serves."""
    parser = argparse.ArgumentParser(prog="liver_hpc.worker.main", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--layout", required=True, help="layout to rehearse, as tp2 pp1 dp2")
    options = parser.parse_args(arguments)
    drop_unwritable_output()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [%(threadName)s] %(message)s"
    )
    quieten()
    try:
        line = WorkersEnd(socket.socket(fileno=int(os.environ["LIVER_AGENT_FD"])))
        try:
            worker = boot(options.run_directory, Layout.parse(options.layout))
        except Exception as error:
            line.send_bytes(told_of(error).encode(errors="replace"))
            raise
        line.send_bytes(BOOTED)
        told = json.loads(line.receive_bytes())
        try:
            worker.serve(int(told["worker"]), told["host"], line)
        except Exception as error:
            line.send_bytes(told_of(error).encode(errors="replace"), Way.OWN)
            raise
    except Exception:
        log.exception("worker failed")
        logging.shutdown()
        # Not sys.exit: blocked collectives and native threads must not hold the process up.
        os._exit(EXIT_FAILED)


def boot(run_directory: Path, layout: Layout) -> Worker:
    """A worker, as far as it comes alone. Chooses cores, network and device of this process."""
    place = int(os.environ.get(PLACE_VARIABLE, "0"))
    take_core(place)
    _choose_network(run_directory)
    config = load_run(run_directory / "run.yaml")
    put_first_on_path(config)
    imported_code(config.recipe)
    with collector_paused():
        from liver_hpc.world.device import gpu_addresses, open_device

        # Before megatron is imported: where there is no CUDA, the device brings the stand-in.
        device = open_device(place, wanted_gpus=config.cluster.wanted_gpus(place))
        if config.workers.bind == "auto" and not os.environ.get(CORES):
            _stay_near(gpu_addresses(), place)
        from liver_hpc.worker.control import Worker

    return Worker(run_directory, layout, device)


def _stay_near(gpus: Sequence[str], place: int) -> None:
    """Keeps this process to its share of the CPUs that are next to its GPU, where the kernel says
    which these are."""
    if not gpus:
        return
    near = [local_cpus(address) for address in gpus]
    cpus = share_of_cpus(place % len(gpus), near, os.sched_getaffinity(0))
    if cpus:
        bind_process(cpus)
        log.info("bound to CPUs %s, next to GPU %s", sorted(cpus), gpus[place % len(gpus)])


def _choose_network(run_directory: Path) -> None:
    """Tells gloo and NCCL, in the environment, which interfaces and adapters to use.

    Called before torch is imported. Raises ConfigError when this node lacks what the run file
    names.
    """
    config, facts = load_run(run_directory / "run.yaml"), node_facts()
    log_path = nccl_log_path(os.environ, run_directory / "logs", facts, os.getpid())
    chosen = worker_network_environment(config.network, config.cluster.kind, facts, os.environ)
    os.environ.update({NCCL_LOG: str(log_path), **chosen})


def quieten() -> None:
    """Of megatron and torch only errors are logged."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for package in ("megatron", "torch"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=package)


if __name__ == "__main__":
    main()
