"""The options of `liver doctor`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from liver_hpc.cli.arguments import count, seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be said on the command line; it beats the run file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="what this run file asks for")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.SUB=VALUE", help="beats the run file"
    )
    parser.add_argument(
        "--nodes", type=count, metavar="N", help="also examine N nodes: takes them for a minute"
    )
    parser.add_argument("--partition", metavar="P", help="take them from this partition")
    parser.add_argument("--account", metavar="A", help="take them on this account")
    parser.add_argument(
        "--gpus-per-node", type=count, metavar="G", help="take nodes with GPUs, for NCCL"
    )
    parser.add_argument(
        "--grant-s", type=seconds, metavar="S", help="wait at most this long for the nodes"
    )
    parser.add_argument(
        "--runs-directory", type=Path, metavar="DIR", help="where runs are to be (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
