"""A GPT whose workers leave strangers time to come to gloo's new ports. Loaded by workers."""

from __future__ import annotations

import threading
from typing import Any

from liver_hpc.recipes.base import BuildContext
from tests.integration.random_tokens import RandomTokenGPT

OPEN_S = 1.0


class BesiegedGPT(RandomTokenGPT):
    def build(self, context: BuildContext) -> Any:
        from liver_hpc.world.network import Network

        plain = Network._new_gloo_devices
        if plain.__name__ != "slowly":

            def slowly(network: Network) -> list[Any]:
                devices = plain(network)
                threading.Event().wait(OPEN_S)
                return devices

            Network._new_gloo_devices = slowly  # type: ignore[method-assign]
        return super().build(context)
