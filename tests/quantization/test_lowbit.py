"""Layers of integers: the layout's tensors bit for bit, the arithmetic that they stand for, what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specdraft import lowbit
from specdraft.config import SpecdraftError
from specdraft.lowbit import QuantizedLinear, Scheme, pack, unpack
from specdraft.quantization.rounding import nearest_scale, to_nearest

W8A8, INT8, INT4 = Scheme(8, activations=True), Scheme(8), Scheme(4, 16)
SCHEMES = (W8A8, INT8, INT4)


def quantized(scheme: Scheme, plain: nn.Linear, dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    scale = nearest_scale(plain.weight.detach(), scheme, dtype)
    return QuantizedLinear.of(plain, to_nearest(plain.weight.detach(), scale, scheme), scale, scheme)


def test_element_j_of_a_word_stands_at_its_bits_4j_raised_by_8() -> None:
    row = torch.tensor([[-8, -7, 0, 1, 2, 3, 7, -1]], dtype=torch.int8)
    word = sum((int(value) + 8) << (4 * place) for place, value in enumerate(row[0]))
    assert pack(row, 4).dtype == torch.int32
    assert int(pack(row, 4)) % 2**32 == word
    bytes_ = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    assert int(pack(bytes_, 8)) % 2**32 == sum((int(v) + 128) << (8 * place) for place, v in enumerate(bytes_[0]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_packing_is_compressed_tensors_own_and_comes_back(bits: int, columns: int) -> None:
    low = -(2 ** (bits - 1))
    integers = torch.randint(low, -low, (5, columns), dtype=torch.int8)
    packed = pack(integers, bits)
    assert torch.equal(unpack(packed, bits, columns), integers)
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(packed, theirs.pack_to_int32(integers, bits))
    assert torch.equal(theirs.unpack_from_int32(packed, bits, torch.Size([5, columns])), integers)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_tensors_and_config_are_what_compressed_tensors_reads(scheme: Scheme) -> None:
    """Its own compressor gives back the numbers that the layer stands for, by the config that we write."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    module = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 3))
    module.set_submodule("0", quantized(scheme, module[0], torch.bfloat16))  # type: ignore[arg-type]
    written = lowbit.config_of(module)[lowbit.KEY]
    read = quantization.QuantizationConfig.model_validate(written)
    (group,) = read.config_groups.values()
    assert read.format == ("int-quantized" if scheme.activations else "pack-quantized")
    held = {name: tensor for name, tensor in module[0].state_dict().items() if name != "bias"}
    reader = compressors.BaseCompressor.get_value_from_registry(read.format)
    assert set(reader.compression_param_names(group)) == held.keys()
    theirs = reader.decompress(held, group)["weight"]
    layer = module[0]
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(theirs.float(), layer.dequantized().to(torch.bfloat16).float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_q03_q08_reported_bits_are_those_of_the_tensors_and_scales_have_the_dtype(scheme: Scheme) -> None:
    layer = quantized(scheme, nn.Linear(64, 40, bias=False), torch.bfloat16)
    held = layer.state_dict()
    assert held["weight_scale"].dtype == torch.bfloat16
    assert held["weight_scale"].shape == (40, 4 if scheme.group_size else 1)
    values = held["weight" if scheme.activations else "weight_packed"]
    assert 8 * values.nbytes == scheme.bits * 64 * 40
    assert values.dtype == (torch.int8 if scheme.activations else torch.int32)
    assert not any(weight.requires_grad for weight in layer.parameters())


def test_weights_only_multiply_what_they_stand_for_and_notice_new_ones() -> None:
    plain, inputs = nn.Linear(32, 24), torch.randn(2, 5, 32)
    layer = quantized(INT4, plain)
    want = linear(inputs, layer.dequantized(), plain.bias)
    torch.testing.assert_close(layer(inputs), want)
    assert not torch.allclose(want, plain(inputs), atol=0.01)
    other = quantized(INT4, nn.Linear(32, 24))
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(inputs), other(inputs))
    precise = copy.deepcopy(layer).to(torch.float64)(inputs.double()).float()
    torch.testing.assert_close(precise, layer(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 7, 32)])
def test_w8a8_rounds_each_token_by_its_own_largest_and_sums_integers(shape: tuple[int, ...]) -> None:
    plain = nn.Linear(32, 24)
    layer, inputs = quantized(W8A8, plain), torch.randn(shape) * 3
    rows = inputs.reshape(-1, 32)
    step = rows.abs().amax(1, keepdim=True) / 127
    integers = (rows / step).round()
    want = (integers.double() @ layer.integers().double().T) * step * layer.weight_scale.T + plain.bias
    torch.testing.assert_close(layer(inputs), want.float().reshape(*shape[:-1], 24), rtol=1e-5, atol=1e-5)


def test_w8a8_a_row_does_not_depend_on_its_neighbours_and_zeros_stay_zeros() -> None:
    layer = quantized(W8A8, nn.Linear(32, 24, bias=False))
    rows = torch.randn(4, 32)
    rows[2] = 0
    together = layer(rows)
    assert torch.equal(together, torch.cat([layer(row[None]) for row in rows]))
    assert not together[2].any()


def test_a_module_with_quantised_layers_is_rebuilt_from_its_config() -> None:
    def fresh() -> nn.Module:
        return nn.ModuleDict({"fc": nn.Linear(32, 32), "layer": nn.Linear(32, 16), "lm_head": nn.Linear(32, 8)})

    module = fresh()
    module.set_submodule("layer", quantized(INT4, module["layer"]))  # type: ignore[index]
    config = lowbit.config_of(module)
    assert config[lowbit.KEY]["ignore"] == ["re:.*fc$", "lm_head"]
    again = fresh()
    lowbit.install(again, config, "here")
    again.load_state_dict(module.state_dict())
    lowbit.check(again, "here")
    assert torch.equal(again["layer"].dequantized(), module["layer"].dequantized())  # type: ignore[index]
    assert lowbit.config_of(fresh()) == {}


def config(**changes: Any) -> dict[str, Any]:
    module = nn.Sequential(quantized(INT4, nn.Linear(32, 8)))
    written = lowbit.config_of(module)[lowbit.KEY]
    weights = written["config_groups"]["group_0"]["weights"]
    for name, value in changes.items():
        (weights if name in weights else written)[name] = value
    return written


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "gptq"}, "quantised by gptq"),
        ({"symmetric": False}, "symmetric integers of 4 or 8 bits"),
        ({"num_bits": 3}, "symmetric integers of 4 or 8 bits"),
        ({"format": "int-quantized"}, "in the format int-quantized"),
        ({"strategy": "tensor"}, "symmetric integers"),
        ({"config_groups": {}}, "cannot be read"),
    ],
)
def test_q03_a_config_that_is_not_handled_is_refused_at_the_start(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecdraftError, match=said):
        lowbit.scheme_of(config(**changes), "here")


def test_groups_that_do_not_divide_bad_scales_and_shapes_are_refused() -> None:
    with pytest.raises(SpecdraftError, match="groups of 16 do not divide the width of 0"):
        lowbit.install(nn.Sequential(nn.Linear(24, 8)), {lowbit.KEY: config()}, "here")
    layer = quantized(INT4, nn.Linear(32, 8))
    layer.weight_scale[0, 0] = 0
    with pytest.raises(SpecdraftError, match="weight_scale holds values that are not positive"):
        lowbit.check(nn.Sequential(layer), "here")
    layer.weight_scale.fill_(1)
    layer.weight_shape.copy_(torch.tensor([8, 31]))
    with pytest.raises(SpecdraftError, match=r"weight_shape says \[8, 31\]"):
        lowbit.check(nn.Sequential(layer), "here")


def test_q06_four_bits_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without oneDNN: there is no kernel whose absence shows late."""
    inputs: Tensor = torch.randn(3, 32)
    layer = quantized(INT4, nn.Linear(32, 24))
    want = linear(inputs, layer.dequantized(), layer.bias)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch.testing.assert_close(layer(inputs), want)
