from __future__ import annotations

import pytest
import yaml

from liver_hpc.report.page.document import HIDDEN, shown_config

RUN_FILE = """\
name: big
cluster:
  slurm:
    setup: [module load cuda, export TOKEN=hunter2]
    burst: {partition: p, options: {export: "ALL,KEY=hunter2", qos: low}}
    components:
    - {name: main, options: {export: KEY=hunter2}}
    step_options: {export: "NONE,KEY=hunter2", mpi: pmix}
    container: {runtime: apptainer, options: ["--env=KEY=hunter2", --nv]}
  health_check: curl -H 'token hunter2' https://site
"""


def test_a_page_does_not_show_what_a_site_logs_in_with() -> None:
    shown = shown_config(RUN_FILE)
    assert "hunter2" not in shown
    slurm = yaml.safe_load(shown)["cluster"]["slurm"]
    assert slurm["setup"] == [f"(2, {HIDDEN})"]
    assert slurm["burst"]["options"] == {"export": HIDDEN, "qos": "low"}
    assert slurm["step_options"] == {"export": HIDDEN, "mpi": "pmix"}
    assert slurm["container"] == {"runtime": "apptainer", "options": [f"(2, {HIDDEN})"]}


@pytest.mark.parametrize(
    "text",
    [
        "name: big\ncluster: {slurm: {setup: []}}  # none\n",
        "",
        "a: [b",
        "just words",
        "model: {options: 3}",
    ],
)
def test_what_holds_nothing_secret_is_shown_as_it_is(text: str) -> None:
    assert shown_config(text) == text
