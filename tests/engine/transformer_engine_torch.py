"""In the place of Transformer Engine's compiled half: what dense layers, norms and Adam call, by
torch, and by what transformer_engine/pytorch says of them. What else is called raises
NotImplementedError with its name."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 1
    kFloat32 = 2
    kFloat16 = 3
    kBFloat16 = 4
    kFloat8E4M3 = 5
    kFloat8E5M2 = 6
    kFloat4E2M1 = 7


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2
    NVTE_No_Backend = -1


_DTYPES: dict[Any, torch.dtype] = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class _Absent:
    """Whatever else its Python half names as it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{self._name}")

    def __int__(self) -> int:
        return 0

    def __or__(self, _other: Any) -> _Absent:
        return self

    __ror__ = __or__


def __getattr__(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


def get_fused_attn_backend(*_of: Any) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


def get_cudnn_version() -> int:
    return 92100


def get_num_cublas_streams() -> int:
    return 4


# ---- products


def generic_gemm(
    a: torch.Tensor,
    transposes_a: bool,
    b: torch.Tensor,
    transposes_b: bool,
    out: torch.Tensor | None,
    quantizer: None,
    out_dtype: Any,
    bias: torch.Tensor | None,
    _bias_dtype: Any,
    gelu: bool,
    _gelu_in: Any,
    grad: bool,
    _workspace: Any,
    _workspace_bytes: int,
    accumulate: bool,
    _split_accumulator: bool,
    **_options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """b @ a of what is flattened to matrices, as cuBLAS's columns are torch's rows."""
    if quantizer is not None or gelu:
        raise NotImplementedError("generic_gemm with a quantizer or with gelu")
    left, right = _matrix(b), _matrix(a)
    product = (left.t() if transposes_b else left) @ (right.t() if transposes_a else right)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = left.sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if not transposes_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    if out is None:
        out = product if out_dtype is None else product.to(_DTYPES[out_dtype])
    elif accumulate:
        out += product
    else:
        out.copy_(product.view_as(out))
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: Sequence[torch.Tensor],
    transposes_a: bool,
    b: Sequence[torch.Tensor],
    transposes_b: bool,
    out: Sequence[torch.Tensor],
    _out_dtype: Any,
    rows: Sequence[int],
    biases: Sequence[torch.Tensor],
    _bias_dtype: Any,
    single_output: bool,
    _gelu_in: Any,
    grad: bool,
    _workspaces: Any,
    _workspace_bytes: int,
    accumulate: bool,
    *_options: Any,
) -> Sequence[torch.Tensor]:
    """A product for each expert; `rows` of one output are each one's, where there is one output."""
    outs = torch.split(out[0], list(rows)) if single_output else out
    for first, second, made, bias in zip(a, b, outs, biases, strict=True):
        left, right = _matrix(second), _matrix(first)
        product = (left.t() if transposes_b else left) @ (right.t() if transposes_a else right)
        if bias.numel() and grad:
            bias.copy_(left.sum(0))
        elif bias.numel():
            product = product + bias
        made.copy_(made + product if accumulate else product)
    return biases


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# ---- norms


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
    made = (x.float() * scale[..., None] * _gain(weight, options)).to(x.dtype)
    return _into(out, made), None, scale


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, at_norm = x.float() * scale[..., None], grad.float() * _gain(weight, options)
    back = at_norm - normed * (at_norm * normed).mean(-1, keepdim=True)
    of_weight = _matrix(grad.float() * normed).sum(0)
    return (scale[..., None] * back).to(x.dtype), of_weight.to(weight.dtype)


def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = x.float().mean(-1)
    centred = x.float() - mean[..., None]
    scale = torch.rsqrt(centred.pow(2).mean(-1) + eps)
    made = centred * scale[..., None] * _gain(weight, options) + bias.float()
    return _into(out, made.to(x.dtype)), mean, scale


def layernorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed = (x.float() - mean[..., None]) * scale[..., None]
    at_norm = grad.float() * _gain(weight, options)
    along = normed * (at_norm * normed).mean(-1, keepdim=True)
    back = scale[..., None] * (at_norm - at_norm.mean(-1, keepdim=True) - along)
    of_weight, of_bias = (_matrix(each).sum(0) for each in (grad.float() * normed, grad.float()))
    return back.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype)


def _gain(weight: torch.Tensor, options: Sequence[Any]) -> torch.Tensor:
    """options: the last one says that the weight is less by one than what it stands for."""
    return weight.float() + 1 if options[-1] else weight.float()


def _into(out: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    return made if out is None else out.copy_(made)


# ---- lists of tensors

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_l2norm(
    _chunk: int, _noop: Any, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else None


def multi_tensor_scale(_chunk: int, _noop: Any, lists: Lists, scale: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_adam(
    _chunk: int,
    _noop: Any,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) where `decoupled`."""
    for gradient, parameter, first, second in zip(*lists, strict=True):
        before, moved = parameter.float(), gradient.float()
        if not decoupled:
            moved = moved + weight_decay * before
        first.mul_(beta1).add_(moved, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(moved, moved, value=1 - beta2)
        mean, square = first, second
        if bias_correction:
            mean, square = first / (1 - beta1**step), second / (1 - beta2**step)
        update = mean / (square.sqrt() + eps)
        if decoupled:
            update = update + weight_decay * before
        parameter.copy_(before - lr * update)
