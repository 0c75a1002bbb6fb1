"""Frozen weights on a CPU, packed once for oneDNN.

`nn.Linear` hands its weight to the BLAS as it lies, which packs it anew in every call: for a handful of tokens that
costs up to three times the product itself, and so makes verifying five tokens look twice as dear as decoding one.
Packing ahead (what torch.compile's freezing does) takes that away from plain and speculative decoding alike. A single
float32 row needs no packing: it is read against the weight as it lies, which is faster.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class PackedLinear(nn.Module):
    """A frozen `nn.Linear`; `weight` and `bias` stay as they were, the packed copy is what multiplies."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        alone = hidden.numel() == self.in_features and hidden.dtype == torch.float32
        if alone or hidden.dtype != self._packed.dtype:  # weights that are float32 for a while, see `lossless`
            return linear(hidden, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain `nn.Linear`: copies are made to be changed, and a packed weight can be neither copied nor changed."""
        copy = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        copy.weight, copy.bias = deepcopy(self.weight, memo), deepcopy(self.bias, memo)
        return copy.train(self.training)


def pack_linears(module: nn.Module) -> None:
    """Replace every CPU `nn.Linear` below `module`, in place: in float32, and in bfloat16 where the CPU computes in it.

    The module must not be trained afterwards.
    """
    if not torch.backends.mkldnn.is_available():
        return
    dtypes = [torch.float32, *[torch.bfloat16] * bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())]
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in dtypes and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child).train(child.training))
