"""The same state moves over NCCL: four processes, on one GPU or more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.processes import run_workers
from tests.integration.test_state_moves import check_there_and_back, there_and_back

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_there_and_back_again_over_nccl_is_bit_equal(dtype: str, tmp_path: Path) -> None:
    check_there_and_back(run_workers(there_and_back, 4, tmp_path, dtype))
