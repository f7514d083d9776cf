"""Which storage belongs to which method."""

from __future__ import annotations

from benchmarks.baseline.methods import Method
from benchmarks.baseline.storage import Storage


def open_storage(method: Method) -> Storage:
    """The storage of a method; imports what it needs."""
    if method in (Method.MEGATRON, Method.MEGATRON_WARM, Method.MEGATRON_ASYNC):
        from benchmarks.baseline.megatron_storage import MegatronStorage

        return MegatronStorage(asynchronous=method is Method.MEGATRON_ASYNC)
    if method is Method.DCP:
        from benchmarks.baseline.dcp_storage import DcpStorage

        return DcpStorage()
    from benchmarks.baseline.liver_storage import LiverStorage

    return LiverStorage()
