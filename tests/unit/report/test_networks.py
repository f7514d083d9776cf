"""Which transports collectives used, in the report."""

from __future__ import annotations

import io

from rich.console import Console

from liver_hpc.report.report import print_report, report_json
from liver_hpc.run.records import NetworkRecord, RunRecords
from tests.unit.report.rows import step

GLOO = NetworkRecord(0, "gloo tcp", "n1,n2", "n1: eth0/10.77.0.11 | n2: eth0/10.77.0.12")
INFINIBAND = NetworkRecord(1, "NET/IB", "n1,n2", "n1: NET/IB/0/GDRDMA")
NVLINK = NetworkRecord(1, "P2P (NVLink)", "n1", "n1: P2P/CUMEM")


def report(*networks: NetworkRecord) -> str:
    text = io.StringIO()
    records = RunRecords([step(0)], [], [], {}, networks=list(networks))
    print_report(records, Console(file=text, width=100))
    return text.getvalue()


def test_the_report_names_the_transport_and_the_worlds_where_it_changed() -> None:
    assert "transport" not in report()
    assert "transport  gloo tcp " in report(GLOO)
    assert "gloo tcp (gen 0); NET/IB, P2P (NVLink) (gen 1)" in report(GLOO, INFINIBAND, NVLINK)


def test_programs_get_all_of_it() -> None:
    document = report_json(RunRecords([], [], [], {}, networks=[NVLINK]))
    assert document["networks"] == [
        {"generation": 1, "transport": "P2P (NVLink)", "hosts": "n1", "detail": "n1: P2P/CUMEM"}
    ]
