"""A worker's end."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVE = """
import sys
import tests.megatron_first
from liver_hpc.worker.control import leave
sys.stdout = sys.stderr = open("/dev/full", "w")
print("a last word that cannot be written")
leave(4)
"""


@pytest.mark.timeout(60)
def test_a_full_disk_does_not_keep_a_worker_from_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, check=False)
    assert done.returncode == 4, done.stderr
