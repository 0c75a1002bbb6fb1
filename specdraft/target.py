"""The frozen target: what a drafter may know of it.

`FrozenTarget.observe` is the training side (features without logits), `head` turns features into logits where they are
wanted, and `session` is the decoding side, see `causal`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdraft.causal import CausalLM
from specdraft.config import Recipe, SpecdraftError
from specdraft.packing import pack_linears


class TargetRecipe(Recipe):
    name: str
    """The target: a Hub id, a checkpoint folder, or a `.gguf` file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the checkpoint's own; on a CPU without bfloat16 instructions, float32."""
    device: str = "auto"
    """`auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, ..."""
    device_map: str | None = None
    """Spread a large target over several devices, as transformers' `device_map` does; replaces `device`."""
    trust_remote_code: bool = False
    """Run model code that the checkpoint brings. Off unless you trust its author."""


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for it: without them, bfloat16 is slower than float32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _resolve_dtype(recipe: TargetRecipe, device: torch.device) -> torch.dtype | str:
    if recipe.dtype != "auto":
        return getattr(torch, recipe.dtype)
    return torch.float32 if device.type == "cpu" and not computes_in_bfloat16(device) else "auto"


class FrozenTarget(CausalLM):
    """A transformers causal LM in eval mode, without gradients. Raises SpecdraftError for what it cannot handle."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str = "in-memory") -> None:
        super().__init__(model.eval().requires_grad_(False), tokenizer, name)
        self.final_norm = [module for name, module in self.body.named_children() if "norm" in name][-1]
        self.fingerprint = _fingerprint(model)
        self._restriction: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._output_head: nn.Module | None = None
        if self.device.type == "cpu":
            pack_linears(self.model)

    @classmethod
    def load(cls, recipe: TargetRecipe) -> "FrozenTarget":
        """Load by Hub id, folder or GGUF file. Raises SpecdraftError if it cannot be found or handled."""
        path, gguf = recipe.name, None
        if path.endswith(".gguf"):
            path, gguf = str(Path(path).parent), Path(path).name
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(default if recipe.device == "auto" else recipe.device)
        common: dict[str, Any] = {"revision": recipe.revision, "trust_remote_code": recipe.trust_remote_code}
        if gguf is not None:
            common["gguf_file"] = gguf
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=_resolve_dtype(recipe, device), device_map=recipe.device_map, **common
            )
            tokenizer = AutoTokenizer.from_pretrained(path, **common)
        except (OSError, ValueError) as error:
            said = str(error).split("\nModel type should be one of")[0]  # and then every class that there is
            raise SpecdraftError(f"cannot load the target {recipe.name!r}: {said}") from error
        if recipe.device_map is None:
            nn.Module.to(model, device)
        return cls(model, tokenizer, recipe.name)

    @torch.no_grad()
    def restricted_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The logits of `ids` alone: [..., H] and int64 [k] to [..., k]. The rows of one `ids` are gathered once."""
        if self._restriction is None or self._restriction[0] is not ids:
            self._restriction = ids, self._head.weight[ids], None if self._head.bias is None else self._head.bias[ids]
        _, weight, bias = self._restriction
        return self.finish(nn.functional.linear(hidden.to(weight.device, weight.dtype), weight, bias))

    def output_head(self) -> nn.Module:
        """`head` as a frozen module that gradients pass through, for drafters that speak through it. It shares the
        target's weight; a plain nn.Linear where the logits are neither scaled nor capped."""
        if self._output_head is None:
            linear = nn.Linear(self.hidden_size, self.vocab_size, bias=self._head.bias is not None, device="meta")
            linear.weight = nn.Parameter(self._head.weight.detach(), requires_grad=False)
            if self._head.bias is not None:
                linear.bias = nn.Parameter(self._head.bias.detach(), requires_grad=False)
            probe = torch.ones(1)
            plain = torch.equal(self.finish(probe), probe)
            self._output_head = linear if plain else _FinishedHead(linear, self.finish)
        return self._output_head

    @torch.no_grad()
    def gain(self, norm: nn.Module) -> Tensor:
        """The factors of a norm, [H], however it keeps them (w, or 1 + w): its output for the input of all ones; ones
        for a norm that subtracts the mean."""
        ones = torch.ones(self.hidden_size, dtype=self.dtype, device=self.device)
        return ones if isinstance(norm, nn.LayerNorm) else norm(ones)

    def head_rows(self, ids: Tensor) -> Tensor:
        """The output weights of `ids`, a copy [len(ids), H]: what a drafter's own head starts from."""
        return self._head.weight[ids].clone()


class _FinishedHead(nn.Module):
    def __init__(self, linear: nn.Linear, finish: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.finish = linear, finish

    def forward(self, hidden: Tensor) -> Tensor:
        return self.finish(self.linear(hidden.to(self.linear.weight.dtype)))


def _fingerprint(model: PreTrainedModel) -> str:
    """A short hash of the weights: name, shape and up to 1,024 evenly spaced values, read as float32, of each."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
