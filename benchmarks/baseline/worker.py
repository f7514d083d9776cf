"""A worker of the baseline: `python -m benchmarks.baseline.worker`. It builds one world, trains,
saves when told to, and ends; the next layout has workers of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from benchmarks.baseline.lines import Entered, Writer
from liver_hpc.clock import SystemClock
from liver_hpc.host.interfaces import interface_addresses, interface_holding
from liver_hpc.host.process import collector_paused, take_core
from liver_hpc.layout.coordinates import Layout

EXIT_FAILED = 1


def main() -> NoReturn:
    """Says that it has entered, imports, and serves."""
    clock = SystemClock()
    entered_s = clock.now_s()
    parser = argparse.ArgumentParser(prog="benchmarks.baseline.worker", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--layout", required=True, help="as tp2 pp1 dp2")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--read-fd", type=int, required=True)
    parser.add_argument("--write-fd", type=int, required=True)
    parser.add_argument("--load-directory", type=Path)
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--host", required=True, help="an address of this node's")
    parser.add_argument("--held", action="store_true", help="import, then wait to be let go")
    parser.add_argument("--storage-bytes-per-s", type=float)
    options = parser.parse_args()
    _quieten()
    code = EXIT_FAILED
    try:
        take_core(options.rank)
        writer = Writer(options.write_fd)
        if not options.held:
            writer.send(Entered(at_s=entered_s))
        own = interface_holding(options.host, interface_addresses()) or "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own)
        with collector_paused():
            from liver_hpc.world.device import open_device

            # As CUDA itself has it: loading all kernels at once, which takes seconds, is for what
            # is launched beside training, and here nothing is.
            os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
            # Before megatron is imported: where there is no CUDA, the device brings the stand-in.
            device = open_device(options.rank)
            from benchmarks.baseline.serving import BaselineWorker, Orders

        orders = Orders(
            run_directory=options.run_directory,
            layout=Layout.parse(options.layout),
            rank=options.rank,
            generation=options.generation,
            load_directory=options.load_directory,
            digests=options.digests,
            host=options.host,
            held=options.held,
            storage_bytes_per_s=options.storage_bytes_per_s,
        )
        BaselineWorker(orders, device, clock, writer).run(options.read_fd)
        code = 0
    except Exception:
        logging.getLogger(__name__).exception("worker failed")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: groups and native threads are torn down by the kernel, as fast as it goes.
    os._exit(code)


def _quieten() -> None:
    """Errors, and nothing else, of everybody."""
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s")
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
