"""The `liver doctor` command: its lines, its exit code."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import replace

from liver_hpc.config.load import load_run
from liver_hpc.doctor.examine import examine
from liver_hpc.doctor.findings import Level
from liver_hpc.doctor.order import Order


def run(options: argparse.Namespace) -> int:
    """Prints findings as they are made; 1 when a check has failed, else 0."""
    config = load_run(options.config, options.set) if options.config else None
    given = {
        name: getattr(options, name)
        for name in ("nodes", "partition", "account", "gpus_per_node", "grant_s")
        if getattr(options, name) is not None
    }
    order = replace(Order.of(config, options.runs_directory), **given)
    has_failed = False
    with closing(examine(order)) as findings:
        for finding in findings:
            print(json.dumps(finding.json()) if options.json else finding.line(), flush=True)
            has_failed |= finding.result.level is Level.FAIL
    return int(has_failed)
