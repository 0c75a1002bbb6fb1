"""What must hold for every entry of DRAFTERS once it is in integers, whatever its method."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from models import tiny_model
from quantized import SCHEMES, in_integers, trained
from safetensors.torch import load_file
from torch import Tensor

from specdraft import lowbit
from specdraft.decoding import generate
from specdraft.drafters import DRAFTERS, load_drafter
from specdraft.drafters.base import Drafter, TrainableDrafter, read_servable
from specdraft.drafters.shapes import Chain, DynamicTree
from specdraft.lowbit import Scheme
from specdraft.packing import pack_linears
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

KINDS = sorted(DRAFTERS)
PROMPTS = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13]]


def laws(drafter: TrainableDrafter, target: FrozenTarget) -> list[Tensor]:
    tokens = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(4))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps)
    with torch.no_grad():
        return [p.head(p.hidden).float().softmax(-1) for p in drafter.predict(tokens, seen)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_q04_q09_only_projections_change_and_what_is_saved_computes_the_same_when_loaded(
    kind: str, scheme: str, tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model())
    drafter = trained(kind, target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    in_integers(drafter, scheme)
    layers = lowbit.quantized_linears(drafter)
    assert layers
    assert not [name for name in layers if "lm_head" in name or name.split(".")[-1] in ("fc", "input_proj")]
    after = drafter.state_dict()
    for name, tensor in before.items():
        if name.rpartition(".")[0] not in layers:
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    loaded.attach(target)
    assert loaded.state_dict().keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in loaded.state_dict().items())
    for one, other in zip(laws(drafter, target), laws(loaded, target), strict=True):
        assert torch.equal(one, other)
    pack_linears(loaded)  # as whoever decodes with it does; what it writes is the same
    loaded.save_pretrained(tmp_path / "again")
    again, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", tmp_path))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert read_servable(tmp_path / "again") == read_servable(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_q10_int8_keeps_alpha_and_four_bits_calibrated_less_so(kind: str) -> None:
    """sum_x min(q, q') over all depths: what one law is accepted where the other is the target's."""
    target = FrozenTarget(tiny_model())
    whole = laws(trained(kind, target), target)
    kept = {}
    for scheme in SCHEMES:
        held = laws(in_integers(trained(kind, target), scheme), target)
        kept[scheme] = min(float(torch.minimum(a, b).sum(-1).mean()) for a, b in zip(whole, held, strict=True))
    assert kept["int8"] > 0.98
    assert kept["w8a8"] > 0.95
    assert kept["int8"] > kept["int4"] > 0.4


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 3, 7)], ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_q10_greedy_output_is_the_targets_with_any_quantised_drafter(kind: str, shape: Any) -> None:
    target = FrozenTarget(tiny_model())
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 10, "batch_size": 3}
    plain = [g.tokens for g in generate(target, None, PROMPTS, **settings).generations]
    for scheme in ("w8a8", "int4"):
        drafter = in_integers(trained(kind, target), scheme)
        drafter.shape = shape
        run = generate(target, cast(Drafter, drafter), PROMPTS, **settings)
        assert [g.tokens for g in run.generations] == plain


def test_head_and_fusion_by_choice() -> None:
    target = FrozenTarget(tiny_model())
    drafter = in_integers(trained("eagle3", target), "w8a8", head=True, fusion=True)
    assert not lowbit.plain_linears(drafter)
    assert {"fc", "lm_head"} < lowbit.quantized_linears(drafter).keys()
    assert drafter.dtype == torch.float32
    one, other = laws(drafter, target)[0], laws(trained("eagle3", target), target)[0]
    assert float(torch.minimum(one, other).sum(-1).mean()) > 0.9


def test_a_scheme_is_told_in_words() -> None:
    assert str(Scheme(4, 64)) == "INT4 in groups of 64, weights only"
    assert str(Scheme(8, activations=True)) == "INT8 per channel, activations INT8 per token"


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_in_bfloat16_predicts_for_a_target_in_float32(kind: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter = in_integers(trained(kind, target), "int8", dtype="bfloat16")
    tokens = torch.arange(3, 20)[None]
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps)
    with torch.no_grad():
        assert all(p.logits(p.hidden).isfinite().all() for p in drafter.predict(tokens, seen))
