"""What the process has imported from which the worker processes of tests are forked."""

from __future__ import annotations

import importlib

from liver_hpc.host.process import collector_paused

with collector_paused():
    import torch

    # Where there may be a CUDA device, the workers themselves have to open it.
    if torch.version.cuda is None:
        from liver_hpc.world.device import open_device

        open_device(0)
        importlib.import_module("liver_hpc.world.megatron")
