"""Linear layers with integer weights, in the tensors and the `quantization_config` of compressed-tensors 0.17.

A weight is scale * q, q an integer of 4 or 8 bits and the scale one a row, or one for each group of a row's columns.
vLLM, SGLang and transformers read the layout. Here it needs no package: a module has the layout's tensors as its own,
so that saving, loading and the strict checks of a checkpoint are those of every other module.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from specdraft.config import SpecdraftError
from specdraft.packing import PackedLinear, pack_linears

KEY = "quantization_config"
"""Of config.json."""
METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How weights are held."""

    bits: Literal[4, 8]
    group_size: int | None = None
    """Columns that share a scale; None: a whole row."""
    activations: bool = False
    """Inputs are brought to 8 bits as well, with a scale for each token that is found on the way (W8A8)."""

    @property
    def largest(self) -> int:
        """The largest q; the smallest is one further from 0."""
        return 2 ** (self.bits - 1) - 1

    def groups(self, width: int) -> int:
        """Scales of a row of so many columns."""
        return 1 if self.group_size is None else width // self.group_size

    def __str__(self) -> str:
        weights = f"INT{self.bits}" + (f" in groups of {self.group_size}" if self.group_size else " per channel")
        return f"{weights}, activations INT8 per token" if self.activations else f"{weights}, weights only"


class QuantizedLinear(nn.Module):
    """A frozen linear layer of a scheme; every q is 0 until it is set or loaded.

    Inputs of 8 bits are multiplied as integers. Weight-only layers multiply the weight that scale and q stand for,
    made once at the first call and in the dtype of the scales: the schemes' arithmetic, not the memory that they save.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: Scheme) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        if scheme.activations:
            self.weight = _frozen(torch.zeros(out_features, in_features, dtype=torch.int8))
        else:
            self.weight_packed = _frozen(pack(torch.zeros(out_features, in_features, dtype=torch.int8), scheme.bits))
            self.weight_shape = _frozen(torch.tensor([out_features, in_features]))
        self.weight_scale = _frozen(torch.ones(out_features, scheme.groups(in_features)))
        self.bias = _frozen(torch.zeros(out_features)) if bias else None
        self._dense: tuple[tuple[Any, ...], nn.Module] | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, plain: nn.Linear, integers: Tensor, scale: Tensor, scheme: Scheme) -> "QuantizedLinear":
        """In the place of `plain`: int8 [out, in] integers, and scales [out, groups], whose dtype it has."""
        made = cls(plain.in_features, plain.out_features, plain.bias is not None, scheme)
        held = integers.cpu() if scheme.activations else pack(integers.cpu(), scheme.bits)
        made._values().copy_(held)
        made.weight_scale = _frozen(scale.detach().cpu().clone())
        if made.bias is not None:
            made.bias = _frozen(plain.bias.detach().to("cpu", scale.dtype, copy=True))
        return made.to(plain.weight.device).train(plain.training)

    def _values(self) -> nn.Parameter:
        return self.weight if self.scheme.activations else self.weight_packed

    def integers(self) -> Tensor:
        """q, int8 [out, in]."""
        if self.scheme.activations:
            return self.weight.detach()
        return unpack(self.weight_packed.detach(), self.scheme.bits, self.in_features)

    def dequantized(self) -> Tensor:
        """scale * q, float32 [out, in]."""
        scale = self.weight_scale.detach().float()
        grouped = self.integers().float().unflatten(1, (scale.shape[1], -1))
        return (grouped * scale[..., None]).flatten(1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._in_integers(hidden) if self.scheme.activations else self._as_dense()(hidden)

    def _in_integers(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features).float()
        step = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        integers = (rows / step).round().to(torch.int8)
        if hidden.device.type == "cpu":
            product = torch._int_mm(integers, self.weight.T).float()
        else:  # the same sums but for rounding in the last of 24 bits
            product = linear(integers.float(), self.weight.float())
        out = product * step * self.weight_scale.float().T
        if self.bias is not None:
            out = out + self.bias.float()
        return out.to(hidden.dtype).reshape(*hidden.shape[:-1], self.out_features)

    def _as_dense(self) -> nn.Module:
        scale, bias = self.weight_scale, self.bias
        key = (scale.dtype, scale.device, scale._version, self._values()._version)
        if self._dense is None or self._dense[0] != key:
            plain = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
            plain.weight = _frozen(self.dequantized().to(scale.dtype))
            plain.bias = bias  # type: ignore[assignment]
            around = nn.Sequential(plain)
            pack_linears(around)
            self._dense = key, around
        return self._dense[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dense": None}  # a copy makes its own

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def pack(integers: Tensor, bits: int) -> Tensor:
    """int8 [rows, columns] to int32 [rows, words]: element j of a word at its bits j * bits, each q + 2^(bits - 1).

    What is left of a row's last word is 0.
    """
    each = 32 // bits
    raised = pad(integers.int() + 2 ** (bits - 1), (0, -integers.shape[1] % each)).unflatten(1, (-1, each))
    return (raised << torch.arange(0, 32, bits, dtype=torch.int32, device=integers.device)).sum(-1, dtype=torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """What `pack` packed, int8 [rows, columns]."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    raised = ((packed[..., None] >> places) & (2**bits - 1)).flatten(1)[:, :columns]
    return (raised - 2 ** (bits - 1)).to(torch.int8)


def quantized_linears(module: nn.Module) -> dict[str, QuantizedLinear]:
    """By name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, QuantizedLinear)}


def engine_dtype(drafter: nn.Module, target: torch.dtype) -> torch.dtype | None:
    """The dtype in which engines draft: their target's; None, as it is, where layers are quantised."""
    return None if quantized_linears(drafter) else target


def plain_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """By name: what could be quantised."""
    return {name: child for name, child in module.named_modules() if type(child) is nn.Linear}


def _wide_linears(module: nn.Module) -> list[str]:
    """Names of those that are not quantised, packed or not."""
    return [name for name, child in module.named_modules() if type(child) in (nn.Linear, PackedLinear)]


def config_of(module: nn.Module) -> dict[str, Any]:
    """The entry of config.json that describes the module's quantised layers; nothing where it has none."""
    held = quantized_linears(module)
    if not held:
        return {}
    (scheme,) = {layer.scheme for layer in held.values()}
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if scheme.activations else None,
        "output_activations": None,
    }
    return {
        KEY: {
            "quant_method": METHOD,
            "format": "int-quantized" if scheme.activations else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": _ignored(_wide_linears(module), held),
        }
    }


def _ignored(plain: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The layers to leave alone, as patterns that also hold where an engine puts a name before ours."""
    found: dict[str, None] = {}
    for name in plain:
        parts = name.split(".")
        end = r"\.".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])
        pattern = "lm_head" if name == "lm_head" else f"re:.*{end}$"
        if any(_matches(pattern, other) for other in quantized):
            pattern = f"re:.*{re.escape(name)}$"
        found[pattern] = None
    return list(found)


def _matches(pattern: str, name: str) -> bool:
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def scheme_of(written: dict[str, Any], where: str) -> Scheme:
    """The scheme of a `quantization_config`. Raises SpecdraftError for one that is not handled here."""
    try:
        method = written.get("quant_method", "an unnamed method")
        if method != METHOD:
            raise SpecdraftError(
                f"{where}: quantised by {method}; handled here is {METHOD}, as `specdraft quantize` "
                "writes it; bitsandbytes is for draft LMs alone"
            )
        (group,) = written["config_groups"].values()
        weights, inputs = group["weights"], group["input_activations"]
        scheme = Scheme(
            bits=cast(Literal[4, 8], weights["num_bits"]),
            group_size=weights["group_size"] if weights["strategy"] == "group" else None,
            activations=inputs is not None,
        )
        fine = weights["type"] == "int" and weights["symmetric"] and not weights.get("actorder")
        fine = fine and scheme.bits in (4, 8) and weights["strategy"] in ("group", "channel")
        fine = fine and (inputs is None or (inputs["strategy"] == "token" and inputs["dynamic"] and scheme.bits == 8))
        fine = fine and written["format"] == ("int-quantized" if scheme.activations else "pack-quantized")
    except (KeyError, TypeError, ValueError) as error:
        raise SpecdraftError(f"{where}: {KEY} cannot be read: {error!r}") from error
    if not fine:
        raise SpecdraftError(
            f"{where}: {KEY} asks for {weights} and inputs {inputs} in the format {written['format']}; handled are "
            "symmetric integers of 4 or 8 bits by channel or group (pack-quantized), or 8 bits by channel with dynamic "
            "inputs by token (int-quantized)"
        )
    return scheme


def install(module: nn.Module, config: dict[str, Any], where: str) -> None:
    """Put quantised layers, still to be loaded, where a checkpoint's config.json has them, in place.

    Raises SpecdraftError for a scheme that is not handled, or one whose groups do not divide a layer's width.
    """
    if KEY not in config:
        return
    scheme, ignore = scheme_of(config[KEY], where), config[KEY].get("ignore") or []
    for name, plain in plain_linears(module).items():
        if any(_matches(pattern, name) for pattern in ignore):
            continue
        if scheme.group_size is not None and plain.in_features % scheme.group_size:
            raise SpecdraftError(f"{where}: groups of {scheme.group_size} do not divide the width of {name}")
        empty = QuantizedLinear(plain.in_features, plain.out_features, plain.bias is not None, scheme)
        module.set_submodule(name, empty.to(plain.weight.device).train(plain.training))


def check(module: nn.Module, where: str) -> None:
    """Raises SpecdraftError unless every quantised layer's own tensors agree and its scales are positive."""
    for name, layer in quantized_linears(module).items():
        scale, said = layer.weight_scale, [layer.out_features, layer.in_features]
        if not (scale.isfinite() & (scale > 0)).all():
            raise SpecdraftError(f"{where}: {name}.weight_scale holds values that are not positive numbers")
        if not layer.scheme.activations and (found := layer.weight_shape.tolist()) != said:
            raise SpecdraftError(f"{where}: {name}.weight_shape says {found}, its weight is {said}")
