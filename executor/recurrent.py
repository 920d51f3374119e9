"""Recurrent layers of a user's own (nn.LSTM, nn.GRU, nn.RNN): what their fused kernels keep for backward.

Of tensors without memory torch says that it is nothing: it would have to ask the library, with real ones. On a CPU an
LSTM runs by oneDNN, one kernel a layer and direction; the others run step by step, and are counted as they are. On a
card all run by cuDNN, one kernel for all layers.

Legend: B batch, T length, H hidden size, D directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.kernels.registry import cost

aten = torch.ops.aten

PLACE = "recurrent_kernels"
"""Where what the kernels keep is counted: apart from the part of the model that calls them."""
KEPT = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3}
"""By operator, which of its results is that."""

# oneDNN's workspace, by its rows in memory: of H numbers, of the input's or H (whichever is more), of the four gates.
# The last two are a multiple of 64 bytes, and 64 more where that is a multiple of 256 numbers. By the bytes of a number
# that it computes with: bytes a step and number of each kind of row. What lies in it begins at whole pages, which adds
# three or so. Of 15 layers in fp32 it is 2 % off at most, of 7 in 16 bits 3.2 %, and 10 % of ones with 8 or 48 numbers.
_BYTES_A_STEP = {4: (20, 24, 4), 2: (14, 20, 2)}
_GATES = 4
_PAGES_BYTES = 3 * 4096

CUDNN_NUMBERS = {"lstm": 8, "gru": 6, "rnn": 2}
"""Numbers that cuDNN is assumed to keep for each of H, a layer, direction and token: gates, cells and outputs. No
document tells, and it is not measured yet."""
_MODES = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}  # cuDNN's own numbers
_KINDS = ("rnn", "rnn", "lstm", "gru")


def onednn_bytes(length: int, batch: int, inputs: int, hidden: int, width: int) -> int:
    """The workspace of one layer and direction of an LSTM; ``width``: bytes of a number that it computes with."""
    own, wider, gates = _BYTES_A_STEP[width]
    own, wider = own * hidden, wider * _leading(max(inputs, hidden), width)
    first = 4 * own // 5 + wider  # states before the first step
    return batch * (length * (own + wider + gates * _leading(_GATES * hidden, width)) + first) + _PAGES_BYTES


def _leading(count: int, width: int) -> int:
    step = 64 // width
    rounded = -(-count // step) * step
    return rounded if rounded % 256 else rounded + step


def _layer(input: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, hx: Tensor, cx: Tensor, reverse: bool,
           batch_sizes: Sequence[int], mode: int, hidden: int, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """What oneDNN makes of [T, B, I]."""
    length, batch = input.shape[:2]
    workspace = input.new_empty(
        onednn_bytes(length, batch, input.shape[2], hidden, input.element_size()), dtype=torch.uint8
    )
    return input.new_empty(length, batch, hidden), torch.empty_like(hx), torch.empty_like(cx), workspace


def _cudnn(input: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor | None, hx: Tensor, cx: Tensor | None,
           mode: int, hidden: int, projected: int, layers: int, batch_first: bool, dropout: float, train: bool,
           bidirectional: bool, *_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """What cuDNN makes of [T, B, I], or of [B, T, I] with ``batch_first``."""
    directions, tokens = 1 + bidirectional, input.shape[0] * input.shape[1]
    out = input.new_empty(*input.shape[:2], directions * (projected or hidden))
    numbers = CUDNN_NUMBERS[_KINDS[mode]] * hidden * layers * directions * tokens
    reserve = input.new_empty(numbers * input.element_size() * train, dtype=torch.uint8)
    cells = input.new_empty(0) if cx is None else torch.empty_like(cx)
    return out, torch.empty_like(hx), cells, reserve, input.new_empty(0)


def _cudnn_backward(
    input: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    cells = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    return torch.empty_like(input), torch.empty_like(hx), cells, [torch.empty_like(item) for item in weight]


def _flops(input: Tensor, *args: Any, out: Any) -> int:
    """Products of every token with every weight that is a matrix."""
    weights = args[0] if isinstance(args[0], list | tuple) else args[:4]
    matrices = sum(item.numel() for item in weights if item.dim() == 2)
    return int(2 * input.shape[0] * input.shape[1] * matrices)


def _flops_backward(input: Tensor, *args: Any, out: Any) -> int:
    return 2 * _flops(input, *args, out=out)


def _onednn_inside(input: Tensor, *args: Any, out: Any) -> int:
    """Bytes that a layer's backward takes and returns within itself: its matrices and their gradients in oneDNN's
    order, and the gates' gradients in fp32."""
    matrices = [item for item in args[:4] if item.dim() == 2]
    gates = max(item.shape[0] for item in matrices)
    return int(2 * sum(item.nbytes for item in matrices) + 4 * input.shape[0] * input.shape[1] * gates)


cost("aten::mkldnn_rnn_layer", _flops, launches=1)
cost("aten::mkldnn_rnn_layer_backward", _flops_backward, 1, _onednn_inside)
cost("aten::_cudnn_rnn", _flops, launches=1)
cost("aten::_cudnn_rnn_backward", _flops_backward, launches=1)

SHAPES: dict[Any, Callable[..., Any]] = {aten.mkldnn_rnn_layer.default: _layer}
CARD_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _cudnn,
    aten._cudnn_rnn_backward.default: _cudnn_backward,
}
"""What stands for them on tensors without memory."""


def _by_cudnn(name: str, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, layers: int,
              dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """A recurrent layer as a card calls it, its weights cast by autocast where that is on."""
    h, c = hx if name == "lstm.input" else (hx, None)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        input, h, c = input.to(dtype), h.to(dtype), None if c is None else c.to(dtype)
        params = [item.to(dtype) for item in params]
    hidden = h.shape[-1] if c is None else c.shape[-1]
    projected = h.shape[-1] if h.shape[-1] != hidden else 0
    stride = len(params) // (layers * (1 + bidirectional))
    out, h, c, *_ = aten._cudnn_rnn.default(
        input, params, stride, None, h, c, _MODES[name], hidden, projected, layers, batch_first, dropout, train,
        bidirectional, [], None,
    )  # fmt: skip
    return (out, h, c) if name == "lstm.input" else (out, h)


def on_a_card(library: torch.library.Library) -> None:
    """Have recurrent layers on CPU tensors dispatched as a card's are, as long as ``library`` lives."""
    for operator, shapes in CARD_SHAPES.items():
        library.impl(operator, shapes, "CPU")  # type: ignore[no-untyped-call]
    for name in _MODES:
        library.impl(name, partial(_by_cudnn, name), "AutogradCPU")  # type: ignore[no-untyped-call]
