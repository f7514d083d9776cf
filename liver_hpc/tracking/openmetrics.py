"""A run's figures in the text format of OpenMetrics."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from liver_hpc.config.schema import OpenMetricsSection
from liver_hpc.report.derive import RunFigures
from liver_hpc.run.outcome import write_private_json
from liver_hpc.run.secret import create_secret, read_secret
from liver_hpc.tracking.base import SHARE, Mark, Point, Tracker
from liver_hpc.tracking.course import RECIPES
from liver_hpc.tracking.endpoint import Endpoint

ADDRESS_FILE = "openmetrics.json"
TOKEN_FILE = "openmetrics-token"


class OpenMetrics(Tracker):
    """Answers with what is newest. figures: derives them; now: what is so whenever it is asked for,
    in the place of what the last step had of it. Both from any thread."""

    keeps = False

    def __init__(
        self,
        section: OpenMetricsSection,
        directory: Path,
        run_name: str,
        figures: Callable[[], RunFigures],
        now: Callable[[], Mapping[str, float]],
    ) -> None:
        """Makes the token in `directory` where there is none, and tells there where it listens."""
        token = directory / TOKEN_FILE
        secret = read_secret(token) if token.exists() else create_secret(token)
        self._run_name = run_name
        self._figures = figures
        self._now = now
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._step = 0
        self._failed_checkpoints = 0
        self._changed = True
        self._derived: list[Metric] = []
        self._next_s = 0.0
        self._endpoint = Endpoint(
            (section.host, section.port), secret.hex(), self.text, CONTENT_TYPE_LATEST
        )
        host, port = self._endpoint.address
        self._address_path = directory / ADDRESS_FILE
        write_private_json(self._address_path, {"host": host, "port": port})

    def take(self, what: Point | Mark) -> None:
        with self._lock:
            self._changed = True
            if isinstance(what, Point):
                self._step = what.step
                if what.is_step:  # a metric may be told at some steps alone
                    kept = self._newest.items()
                    self._newest = {k: v for k, v in kept if not k.startswith(RECIPES)}
                self._newest.update(what.values)
            elif what.kind == "checkpoint":
                self._failed_checkpoints += 1

    def flush(self) -> None:
        """Who asks gets the newest."""

    def close(self) -> None:
        self._address_path.unlink(missing_ok=True)
        self._endpoint.close()

    def text(self) -> bytes:
        """The answer, from any thread: what was told last, and figures that may be older."""
        with self._lock:
            if self._changed and time.monotonic() >= self._next_s:
                self._changed = False
                begun_s = time.monotonic()
                self._derived = [*of_figures(self._figures())]
                now_s = time.monotonic()
                self._next_s = now_s + SHARE * (now_s - begun_s)
            return exposed([*self._of_points(), *self._derived], self._run_name)

    def _of_points(self) -> Iterator[Metric]:
        about = "Training steps that are done."
        yield GaugeMetricFamily("liver_steps_done", about, value=self._step)
        yield CounterMetricFamily(
            "liver_failed_checkpoints",
            "Checkpoints that have come to nothing.",
            value=self._failed_checkpoints,
        )
        values = {**self._newest, **self._now()}
        for name, about in _OF_POINTS.items():
            if name in values:
                known = f"liver_{name.replace('/', '_')}"
                yield GaugeMetricFamily(known, about, value=values[name])
        told = {k.removeprefix(RECIPES): v for k, v in values.items() if k.startswith(RECIPES)}
        if told:
            about = "What the recipe told beside the loss of the last step."
            family = GaugeMetricFamily("liver_metric", about, labels=["name"])
            for name, value in told.items():
                family.add_metric([name], value)
            yield family


_OF_POINTS = {
    "train/loss": "Loss of the last step.",
    "train/grad_norm": "Gradient norm of the last step.",
    "train/learning_rate": "Learning rate of the last step.",
    "train/step_s": "What the last step took, in seconds.",
    "train/tokens_per_s": "Tokens a second of the last step.",
    "validation/loss": "Loss of the last evaluation.",
    "run/workers": "Workers of the world that trains.",
    "run/nodes": "Nodes that are held.",
    "checkpoint/step": "Step of the newest checkpoint.",
    "checkpoint/took_s": "What the newest checkpoint took, in seconds.",
}


def exposed(families: list[Metric], run_name: str) -> bytes:
    """As text, each sample with the run's name."""
    for family in families:
        family.samples = [
            sample._replace(labels={"run": run_name, **sample.labels}) for sample in family.samples
        ]
    ready = SimpleNamespace(collect=lambda: families)
    return bytes(generate_latest(ready))  # type: ignore[no-untyped-call]


def of_figures(figures: RunFigures) -> Iterator[Metric]:
    """What the report derives. A figure that is not known is left out."""
    for name, about, value in (
        ("liver_goodput_ratio", "Share of time in which training made progress.", figures.goodput),
        ("liver_last_pause_seconds", "Pause of the last handoff.", _last_pause_s(figures)),
        # Sums that later steps may correct downwards are no counters.
        ("liver_lost_seconds", "Lost time of all handoffs.", figures.lost_s),
        ("liver_slowdown_seconds", "Slowdown of all handoffs.", figures.slowdown_s),
        ("liver_pause_seconds", "Pauses of all handoffs.", figures.pause_s),
        ("liver_tokens", "Tokens that were trained with, each once.", figures.tokens),
    ):
        if math.isfinite(value):
            yield GaugeMetricFamily(name, about, value=value)
    about = "Recoveries from memory."
    yield CounterMetricFamily("liver_recoveries", about, value=len(figures.recoveries))
    outcomes = Counter(attempt.outcome for attempt in figures.reconfigurations)
    family = CounterMetricFamily("liver_handoffs", "Handoffs by outcome.", labels=["outcome"])
    for outcome in sorted({"completed", "aborted", *outcomes}):
        family.add_metric([outcome], outcomes[outcome])
    yield family
    if figures.stragglers:
        yield _stragglers(figures)
    if figures.hours.nodes:
        yield _hours(figures)


def _stragglers(figures: RunFigures) -> Metric:
    about = "How often a node was found to be slower than others that do the same."
    family = CounterMetricFamily("liver_stragglers", about, labels=["node"])
    for node, times in figures.stragglers.items():
        family.add_metric([node], times)
    return family


def _hours(figures: RunFigures) -> Metric:
    about = f"{figures.hours.unit} by what they were used for; they add up to what is held."
    family = GaugeMetricFamily("liver_worker_hours", about, labels=["partition", "node", "use"])
    for row in figures.hours.nodes:
        uses = {"training": row.training_h, "waiting": row.waiting_h, "lost": row.lost_h}
        for use, hours in uses.items():
            family.add_metric([row.partition, row.node, use], hours)
    return family


def _last_pause_s(figures: RunFigures) -> float:
    known = [each.pause_s for each in figures.reconfigurations if math.isfinite(each.pause_s)]
    return known[-1] if known else math.nan
