"""Which transports NCCL chose, read from what it logs with NCCL_DEBUG=INFO. Pure.

NCCL has no call that tells. These lines are read (here of 2.21):

    n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/3/GDRDMA
    n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    n1:7:9 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 16, bw 30/30, type NVL/PIX, ...
    n1:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHANNEL = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\S+)"
)
_PATTERN = re.compile(r"NCCL INFO\s+Pattern \d+, .*\btype ([A-Z0-9]+)/")
_USING = re.compile(r"NCCL INFO NET/(\w+)\s?: Using (.*)")

_NVLINK = frozenset({"NVL", "NVB", "NVS", "C2C"})
_PCIE = frozenset({"PIX", "PXB", "PHB", "SYS", "NODE"})


@dataclass(frozen=True)
class Chosen:
    """kinds: such as "NET/IB", "NET/Socket", "P2P (NVLink)", "SHM"; sorted. detail: the adapters
    or interfaces, and the ways, in NCCL's words."""

    kinds: tuple[str, ...] = ()
    detail: str = ""


class NcclLog:
    """Reads the log piece by piece, as it grows, and says what each piece shows.

    It remembers the adapters, which NCCL names only once, when it starts.
    """

    def __init__(self) -> None:
        self._using: dict[str, str] = {}
        self._rest = ""

    def read(self, text: str) -> Chosen:
        """What the connections that this piece tells of use; no kinds where it tells of none."""
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        vias: list[str] = []
        paths: set[str] = set()
        for line in lines:
            if found := _CHANNEL.search(line):
                vias.append(found[1].rstrip(".,"))
            elif found := _PATTERN.search(line):
                paths.add(found[1])
            elif found := _USING.search(line):
                self._using[f"NET/{found[1]}"] = found[2].partition(";")[0].strip()
        kinds = {_kind(via, paths) for via in vias}
        ways = sorted(set(vias))
        nets = [f"{kind} {self._using[kind]}" for kind in sorted(kinds) if kind in self._using]
        return Chosen(tuple(sorted(kinds)), "; ".join([", ".join(ways), *nets]) if ways else "")


def _kind(via: str, paths: set[str]) -> str:
    """ "NET/IB/3/GDRDMA" -> "NET/IB"; P2P with its links, where they are certain."""
    family, _, rest = via.partition("/")
    if family == "NET":
        name = rest.partition("/")[0].partition("(")[0]
        return "NET/IB" if name.startswith("IBext") else f"NET/{name}"  # NVIDIA's plugin for IB
    if family != "P2P":
        return family
    if paths and paths <= _NVLINK:
        return "P2P (NVLink)"
    return "P2P (PCIe)" if paths and paths <= _PCIE else "P2P"
