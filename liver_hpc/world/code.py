"""With which code a worker computes, and on which samples: versions, and digests of files as its
process imported them.

Who trains together must have the same, or replicas compute something else without a word.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import liver_hpc
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import versions_of

if TYPE_CHECKING:
    from liver_hpc.world.device import Device

_LOOKED_UP = ("transformer-engine",)


@cache
def imported_code(recipe: str) -> dict[str, str]:
    """Of liver_hpc's own files, of the module of a recipe, which was just imported, and of what may
    be imported later. Once a process, and those that it forks have what it has: files may be others
    by then."""
    package = Path(liver_hpc.__file__).parent
    own = sha256()
    for path in sorted(package.rglob("[!.]*.py")):
        own.update(b"%s\0%s\0" % (str(path.relative_to(package)).encode(), path.read_bytes()))
    found = {"liver_hpc": own.hexdigest()[:16], **versions_of(_LOOKED_UP)}
    module = recipe.partition(":")[0]
    if file := getattr(sys.modules[module], "__file__", None):
        found[module] = _digest(Path(file).read_bytes())
    return found


def code_of(recipe: Recipe, device: Device) -> dict[str, str]:
    """All that workers of one run must have alike, by name; for after the data was opened."""
    import megatron.core
    import torch

    from liver_hpc.world.batches import handles

    texts = {name: _digest(text) for name, text in recipe.texts().items()}
    steps = (0, recipe.config.train.steps - 1)
    samples = {f"batch({step})": handles(recipe.batch(step)) for step in steps}
    return {
        "device": device.torch_device.type,  # a node may have lost its driver
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "megatron-core": megatron.core.__version__,
        **imported_code(recipe.config.recipe),
        **texts,
        # An order may have been drawn, or data may have grown since.
        **{name: _digest(told.encode()) for name, told in samples.items() if told is not None},
    }


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:16]
