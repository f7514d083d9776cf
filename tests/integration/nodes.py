"""Whole runs of real processes on nodes that come and go when a test says so."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import psutil

from liver_hpc.cli.submission import checked_run, new_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.main import run_coordinator, services_of
from liver_hpc.coordinator.performer import Services
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.events import Node
from tests.integration.runs import processes_of, wait_until
from tests.scripted_cluster import ScriptedPool


def workers_of(run: RunDirectory) -> set[psutil.Process]:
    return {each for each in processes_of(run) if "liver_hpc.worker.main" in each.cmdline()}


def on_nodes(config: RunConfig, **slots: int) -> tuple[RunDirectory, ScriptedPool, Thread]:
    """A run whose coordinator is in this process; each node is this machine."""
    run = new_run(*checked_run(config))
    pool = ScriptedPool([Node(name, "main", slots=number) for name, number in slots.items()])

    def build(*arguments: Any) -> Services:
        return replace(services_of(*arguments), pool=pool)

    coordinator = Thread(target=run_coordinator, args=(run.path, Control(), build), daemon=True)
    coordinator.start()
    wait_until(lambda: run.coordinator() is not None, 60.0, "the coordinator to listen")
    return run, pool, coordinator
