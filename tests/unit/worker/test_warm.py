"""What a warm process keeps clear of."""

from __future__ import annotations

import pytest
import torch

from liver_hpc.worker.warm import _knowing_of_cuda


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_module_that_asks_for_cuda_as_it_is_imported_does_not_reach_the_driver(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    with _knowing_of_cuda(has_cuda):
        assert torch.cuda.is_available() is has_cuda
    with pytest.raises(AssertionError, match="the driver was asked"):
        torch.cuda.is_available()
