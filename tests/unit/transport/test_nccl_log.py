"""NCCL's own words about its transports, as its releases 2.18 to 2.27 write them."""

from __future__ import annotations

import pytest

from liver_hpc.transport.nccl_log import Chosen, NcclLog

INFINIBAND = """\
n1:47:47 [0] NCCL INFO Bootstrap : Using eth0:10.4.2.17<0>
n1:47:47 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
NCCL version 2.21.5+cuda12.4
n1:47:48 [0] NCCL INFO NCCL_IB_HCA set to =mlx5_0:1,mlx5_1:1
n1:47:48 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.4.2.17<0>
n1:47:48 [0] NCCL INFO Using network IB
n1:47:48 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 8, bw 20/20, type NVL/PIX, sameChannels 1
n1:47:48 [0] NCCL INFO comm 0x55d rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
n1:47:48 [0] NCCL INFO Channel 00/08 :    0   7   6   5   4   3   2   1   8  15  14  13
n1:47:48 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:47:48 [0] NCCL INFO Channel 04/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA
n1:47:48 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM
n1:47:48 [0] NCCL INFO Connected all rings
"""

SOCKET = """\
n1:31:31 [0] NCCL INFO Bootstrap: Using eth0:10.77.0.11<0>
n1:31:40 [0] NCCL INFO NET/IB : No device found.
n1:31:40 [0] NCCL INFO NET/Socket : Using [0]eth0:10.77.0.11<0>
n1:31:40 [0] NCCL INFO Using network Socket
n1:31:40 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 1.2/1.2, type LOC/PHB, sameChannels 1
n1:31:40 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
n1:31:40 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""

NVLINK = """\
d1:9:9 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 20/20, type NVL/PIX, sameChannels 1
d1:9:9 [0] NCCL INFO Pattern 3, crossNic 0, nChannels 12, bw 30.0/30.0, type NVL/PIX, sameChannels 0
d1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
d1:9:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""

PCIE = """\
ws:9:20 [1] NCCL INFO Pattern 4, crossNic 0, nChannels 2, bw 12.0/12.0, type PHB/PIX, sameChannels 1
ws:9:20 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC
"""

SHARED_MEMORY = """\
ws:9:20 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 2, bw 9.0/9.0, type SYS/PIX, sameChannels 1
ws:9:20 [0] NCCL INFO Channel 00 : 0[1] -> 1[2] via SHM/direct/direct
"""

PLUGIN = """\
a1:7:9 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.1.2<0>
a1:7:9 [3] NCCL INFO Channel 03/0 : 7[3] -> 3[3] [receive] via NET/IBext_v8/3/GDRDMA
"""

EFA = "p5:1:257 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0/GDRDMA\n"


@pytest.mark.parametrize(
    ("log", "kinds", "told"),
    [
        (INFINIBAND, ("NET/IB", "P2P (NVLink)"), "NET/IB [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]"),
        (SOCKET, ("NET/Socket",), "NET/Socket [0]eth0:10.77.0.11<0>"),
        (NVLINK, ("P2P (NVLink)",), "P2P/CUMEM/read"),
        (PCIE, ("P2P (PCIe)",), "P2P/IPC"),
        (SHARED_MEMORY, ("SHM",), "SHM/direct/direct"),
        (PLUGIN, ("NET/IB",), "NET/IBext_v8/3/GDRDMA"),
        (EFA, ("NET/Libfabric",), "NET/Libfabric/0/GDRDMA"),
    ],
)
def test_what_nccl_chose(log: str, kinds: tuple[str, ...], told: str) -> None:
    chosen = NcclLog().read(log)
    assert chosen.kinds == kinds
    assert told in chosen.detail


def test_adapters_that_are_found_but_not_used_are_no_transport() -> None:
    started = INFINIBAND.partition("n1:47:48 [0] NCCL INFO Channel 00/0 : 9")[0]
    assert NcclLog().read(started) == Chosen()


def test_without_the_graph_p2p_is_only_p2p() -> None:
    line = NVLINK.splitlines()[-1]
    assert NcclLog().read(f"{line}\n").kinds == ("P2P",)


def test_a_log_that_grows_tells_of_each_group_alone_and_remembers_the_adapters() -> None:
    log = NcclLog()
    assert log.read(SOCKET).kinds == ("NET/Socket",)
    assert log.read("") == Chosen()
    assert log.read(NVLINK).kinds == ("P2P (NVLink)",)
    head, tail = EFA[:40], EFA[40:]
    assert log.read(head) == Chosen()
    assert log.read(tail).kinds == ("NET/Libfabric",)
    again = log.read("n1:31:40 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n")
    assert "eth0:10.77.0.11" in again.detail
