"""Arguments of Megatron-LM jobs for the tests."""

from __future__ import annotations

import json
from pathlib import Path

JOB = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 62 --mock-data
--micro-batch-size 2 --global-batch-size 8 --train-iters 1000 --lr 1e-3 --eval-interval 1000"""
"""What a run can have; arguments behind these beat them."""


def run_file(directory: Path, more: str = "", sections: str = "", job: str = JOB) -> Path:
    """A run file of such a job; `sections` are lines of YAML behind the others."""
    script = directory / "pretrain_gpt.py"
    script.touch()
    path = directory / "run.yaml"
    args = json.dumps(" ".join(f"{job} {more}".split()))
    path.write_text(
        f"""recipe: liver_hpc.recipes.megatron_lm:Pretrain
model:
  script: {script}
  args: {args}
workers: {{initial: 2, max: 2}}
layouts: {{2: {{dp: 2}}}}
cluster: {{kind: local}}
{sections}""",
        encoding="utf-8",
    )
    return path
