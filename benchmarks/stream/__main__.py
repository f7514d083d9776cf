"""`python -m benchmarks.stream`: TRANSFER against the raw link between the same processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkResult, Spread, parser, reported
from benchmarks.stream.process import WAYS, Process, Report
from benchmarks.stream.transfers import (
    LARGE,
    SMALL,
    Transfer,
    least_bytes,
    pair_bytes,
    transfers,
)
from benchmarks.transitions.pool import Pool
from liver_hpc.config.schema import HandoffSection

PATIENCE_S = 400.0
REPEATS = 7
QUICK_REPEATS = 2
SMALL_HANDOFF = HandoffSection(staging_bytes=2 << 20, bucket_bytes=1 << 18)
TIGHT_HANDOFF = HandoffSection(staging_bytes=16 << 20)

METHOD = {
    "transfers": "replace: all state from one process to another; grow: tp2 to tp2 dp2; reshape: "
    "tp2 dp2 to pp2 dp2 on the same four. Parameters and Adam's moments in fp32, gloo over "
    "loopback, one thread a process, the default staging budget and one of 16 MiB. Where there are "
    "GPUs: NCCL between them; on one GPU through sockets",
    "link_share": "time of the raw link over time of TRANSFER without digests, paired by repeat, "
    "median; the smallest of the three transfers with the default budget. Raw: the same bytes "
    "between the same pairs by torch's batch_isend_irecv out of flat memory, all messages at "
    "once, the faster of one message a pair and messages of a bucket's size. TRANSFER "
    "packs, sends, unpacks, and copies what stays, which raw does not",
    "link_share_digested": "the same of TRANSFER with digests at both ends, as a handoff makes it",
    "time": "from the first process's start behind a barrier to the last one's end",
    "memory_over_budget": "peak memory, resident or of the GPU, of a process's first stream, "
    "transport and cut plan included, over what it had before, divided by the staging budget; the "
    "largest process of all transfers and both budgets. Code that "
    "torch loads for the first product was loaded before",
    "bytes_over_bound": "bytes on the wire, with the gaps between boxes, over what receivers lack "
    "of their boxes; the largest of all",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser("stream", __doc__ or "").parse_args(arguments)
    if options.quick:
        return reported(lambda: run(transfers(SMALL, SMALL_HANDOFF), (), QUICK_REPEATS), options)
    measured, tight = transfers(LARGE, HandoffSection()), transfers(LARGE, TIGHT_HANDOFF)
    return reported(lambda: run(measured, tight, REPEATS), options)


def run(measured: Sequence[Transfer], tight: Sequence[Transfer], repeats: int) -> BenchmarkResult:
    """Runs every transfer in processes of its own. tight: with a small budget, for the memory."""
    rows, found = [], []
    for transfer in (*measured, *tight):
        row, shares = _row(transfer, in_processes(transfer, repeats))
        rows.append(row)
        found.append(shares)
    least = {
        name: min((shares[name] for shares in found[: len(measured)]), key=lambda s: s.median)
        for name in found[0]
    }
    figures = {name: share.median for name, share in least.items()} | {
        "memory_over_budget": max(row["memory_over_budget"] for row in rows),
        "bytes_over_bound": max(row["bytes_over_bound"] for row in rows),
    }
    return BenchmarkResult("stream", figures, rows, method=METHOD, spread=least, repeats=repeats)


def _row(transfer: Transfer, reports: list[Report]) -> tuple[dict[str, Any], dict[str, Spread]]:
    times = durations_s(reports)
    took = {way: Spread.of(each) for way, each in times.items()}
    raw = min(("raw whole", "raw buckets"), key=lambda way: took[way].median)
    share, digested = (
        Spread.of([r / t for r, t in zip(times[raw], times[way], strict=True)])
        for way in ("transfer", "digested")
    )
    wire_bytes, least = sum(pair_bytes(transfer).values()), least_bytes(transfer)
    sent = sum(one.bytes_sent for one in reports)
    assert sent <= wire_bytes, f"{transfer.name}: sent {sent} of {wire_bytes} bytes on the wire"
    extra_bytes = max(one.extra_bytes for one in reports)
    row = {
        "transfer": transfer.name,
        "workers": transfer.workers,
        "staging_bytes": transfer.handoff.staging_bytes,
        "moved_bytes": sent,
        "copied_bytes": sum(one.bytes_copied for one in reports),
        "transfer_s": took["transfer"].median,
        "digested_s": took["digested"].median,
        "raw_s": took[raw].median,
        "raw_way": raw,
        "transfer_bytes_per_s": sent / took["transfer"].median,
        "link_share": share.median,
        "link_share_digested": digested.median,
        "extra_bytes": extra_bytes,
        "memory_over_budget": extra_bytes / transfer.handoff.staging_bytes,
        "bytes_over_bound": wire_bytes / least,
    }
    return row, {"link_share": share, "link_share_digested": digested}


def durations_s(reports: Sequence[Report]) -> dict[str, list[float]]:
    """Of every repeat, from the first worker's start to the last one's end."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for spans in zip(*(one.spans for one in reports), strict=True):
        began_s, ended_s = min(s.began_s for s in spans), max(s.ended_s for s in spans)
        found[spans[0].way].append(ended_s - began_s)
    return found


def in_processes(transfer: Transfer, repeats: int) -> list[Report]:
    """Runs one transfer, by worker. Raises LiverError, DeadlineError."""
    with tempfile.TemporaryDirectory() as name, Pool(transfer.workers, Process, "spawn") as pool:
        store = str(Path(name) / "store")
        return pool.call(f"stream {transfer.name}", PATIENCE_S, "measure", transfer, repeats, store)


if __name__ == "__main__":
    sys.exit(main())
