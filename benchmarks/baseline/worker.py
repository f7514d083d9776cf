"""A worker of the baseline: `python -m benchmarks.baseline.worker ORDERS READ_FD WRITE_FD`. It
builds one world, trains, saves when told to, and ends; the next layout has workers of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import NoReturn

from benchmarks.baseline.lines import Entered, Orders, Writer
from liver_hpc.clock import SystemClock
from liver_hpc.host.interfaces import interface_addresses, interface_holding
from liver_hpc.host.process import collector_paused, take_core

EXIT_FAILED = 1


def main() -> NoReturn:
    """Says that it has entered, imports, and serves."""
    clock = SystemClock()
    entered_s = clock.now_s()
    orders, (read_fd, write_fd) = Orders.model_validate_json(sys.argv[1]), map(int, sys.argv[2:])
    _quieten()
    code = EXIT_FAILED
    try:
        take_core(orders.rank)
        writer = Writer(write_fd)
        if not orders.held:
            writer.send(Entered(at_s=entered_s))
        own = interface_holding(orders.host, interface_addresses()) or "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own)
        with collector_paused():
            from liver_hpc.world.device import open_device

            # As CUDA itself has it: loading all kernels at once, which takes seconds, is for what
            # is launched beside training, and here nothing is.
            os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
            # Before megatron is imported: where there is no CUDA, the device brings the stand-in.
            device = open_device(orders.rank)
            from benchmarks.baseline.serving import BaselineWorker

        BaselineWorker(orders, device, clock, writer).run(read_fd)
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
