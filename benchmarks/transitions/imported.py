"""What the process has imported from which worker processes are forked: it takes seconds."""

from __future__ import annotations

import importlib
import logging
import warnings

from liver_hpc.host.process import collector_paused

# What megatron-core and torch say of themselves and of each other.
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
with collector_paused():
    import torch

    # Where there may be a CUDA device, the workers themselves have to open it.
    if torch.version.cuda is None:
        from liver_hpc.world.device import open_device

        open_device(0)  # before megatron is imported, as in a worker
        importlib.import_module("liver_hpc.world.world")
