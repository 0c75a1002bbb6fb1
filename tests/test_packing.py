"""Packed frozen weights multiply as before."""

import pytest
import torch
from models import tiny_model
from torch import nn

from specdraft.packing import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN packs, and is not built in")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1, 7)])
def test_a_packed_linear_is_its_linear(bias: bool, shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 10, bias=bias).requires_grad_(False)
    packed, hidden = PackedLinear(linear), torch.randn(*shape, 24)
    torch.testing.assert_close(packed(hidden), linear(hidden), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed(hidden.mT.contiguous().mT), linear(hidden), rtol=1e-5, atol=1e-6)
    assert packed.weight is linear.weight
    assert packed.bias is linear.bias


def test_a_model_keeps_its_names_its_weights_and_its_logits() -> None:
    model, tokens = tiny_model().requires_grad_(False), torch.randint(0, 96, (2, 7))
    before, names = model(tokens).logits, dict(model.named_parameters())
    pack_linears(model)
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-4)
    after = dict(model.named_parameters())
    assert after.keys() == names.keys()
    assert all(after[name] is names[name] for name in names)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("rows", [1, 5])
def test_bfloat16_is_packed_where_the_cpu_computes_in_it(rows: int) -> None:
    holder = nn.ModuleDict({"inner": nn.Linear(24, 10).bfloat16()})
    hidden = torch.randn(rows, 24).bfloat16()
    before = holder["inner"](hidden)
    pack_linears(holder)
    assert type(holder["inner"]) is PackedLinear
    torch.testing.assert_close(holder["inner"](hidden), before, rtol=1e-2, atol=1e-2)


def test_only_linears_in_a_precision_of_the_cpu_are_packed() -> None:
    holder = nn.ModuleDict({"wide": nn.Linear(4, 4).double(), "conv": nn.Conv1d(2, 2, 1), "inner": nn.Linear(4, 4)})
    pack_linears(holder.eval())
    assert [type(module).__name__ for module in holder.values()] == ["Linear", "Conv1d", "PackedLinear"]
    assert not holder["inner"].training
