"""MTP: trained and drafted laws are one, one module or several; checkpoints go into and come out of the target's."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import ForcedDice
from enumeration import EXACT
from joint_law import exact_target, joint
from models import COMMON, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Evidence
from specdraft.drafters.mtp import MTPDrafter, MTPRecipe, MTPStackDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.formats.mtp import stitch
from specdraft.reduction import IGNORED, law_positions
from specdraft.target import FrozenTarget
from specdraft.verify import Verdict
from specdraft.warping import Warp

FAMILIES = ("llama", "qwen3", "gemma2")
BOTH = ("one", "each")
TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 0, 0)))


def drafter_for(target: FrozenTarget, modules: str = "each", shaken: bool = True, **recipe: Any) -> MTPDrafter:
    """`shaken`: far from the target's start, so that every part of it matters."""
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    torch.manual_seed(5)
    drafter = MTPDrafter.for_target(target, MTPRecipe.model_validate({"modules": modules, **recipe}), counts)
    return shake(drafter) if shaken else drafter.eval()


@torch.no_grad()
def shake(drafter: MTPDrafter) -> MTPDrafter:
    for weight in drafter.parameters():
        weight += torch.randn_like(weight) * 0.2
    return drafter.eval()


def texts(rows: int, length: int) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def trained_laws(drafter: MTPDrafter, tokens: Tensor) -> list[Tensor]:
    """q of each depth at each slot of whole rows: [batch, time, V] each."""
    seen = drafter.target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
    return [
        prediction.head(prediction.hidden.to(drafter.target.dtype)).softmax(-1)
        for prediction in drafter.predict(tokens, seen)
    ]


def forced_laws(drafter: MTPDrafter, memory: Any, tokens: Tensor) -> Tensor:
    """q at each step of a chain of the given tokens, int64 [batch, steps]: [batch, steps, V]."""
    drafter.shape = Chain(tokens.shape[1])
    laws = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(tokens)).laws
    assert laws is not None
    return laws


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", BOTH)
@torch.no_grad()
def test_t07_t09_e19_training_laws_are_decoding_laws_at_every_depth_and_after_every_round(
    modules: str, family: str
) -> None:
    """Rows of different lengths, one shorter than there are modules; 0 to 4 of 4 accepted, each row another way."""
    target = FrozenTarget(tiny_model(family))
    drafter = drafter_for(target, modules)
    tokens, known, rows = texts(2, 26), torch.tensor([7, 1]), torch.arange(2)
    want = trained_laws(drafter, tokens)
    session = target.session(drafter.taps, 2)
    memory: Any = drafter.begin(session.read(tokens[:, :7], torch.arange(7) < known[:, None]), tokens[rows, known])
    for accepted in ([0, 1], [1, 4], [4, 0], [3, 2]):
        ahead = tokens[rows[:, None], known[:, None] + 1 + torch.arange(4)]
        drafter.shape = Chain(4)
        tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(ahead))
        assert tree.laws is not None
        for step in range(4):
            torch.testing.assert_close(tree.laws[:, step], want[step][rows, known - 1], rtol=0, atol=1e-5)
        assert memory.cache.lengths.tolist() == known.tolist(), "drafts are scratch"
        session.extend(tokens[rows, known], tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(4) < count[:, None], torch.arange(4), -1)
        known = known + count + 1
        verdict = Verdict(path, count, tokens[rows, known], torch.ones(2, 4).bool(), torch.ones(2, 4))
        memory = drafter.remember(memory, verdict, session.commit(verdict))
    memory = drafter.keep(memory, [1])
    laws = forced_laws(drafter, memory, tokens[1:, known[1] + 1 :][:, :3])
    for step in range(3):
        torch.testing.assert_close(laws[0, step], want[step][1, known[1] - 1], rtol=0, atol=1e-5)


@torch.no_grad()
def test_every_module_reads_its_own_token_and_what_the_one_before_handed_on() -> None:
    drafter = drafter_for(FrozenTarget(tiny_model()), "each", depths=3)
    tokens = texts(1, 10)
    seen = drafter.target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
    base = drafter.predict(tokens, seen)
    other = tokens.clone()
    other[0, 7] = tokens[0, 7] % 90 + 3
    blind = seen._replace(taps=torch.cat([seen.taps[:, :5], torch.randn_like(seen.taps[:, 5:])], 1))
    for depth, (was, token, hidden) in enumerate(
        zip(base, drafter.predict(other, seen), drafter.predict(tokens, blind), strict=True), 1
    ):
        assert (was.depth, was.shift) == (depth, depth)
        changed = (token.hidden != was.hidden).any(-1)[0].nonzero()[0].item()
        assert changed == 7 - depth, "x[i + k] is read by slot i of module k"
        assert torch.equal(hidden.hidden[:, :5], was.hidden[:, :5])
        assert not torch.allclose(hidden.hidden[:, 5], was.hidden[:, 5])
    module = drafter.stack[1]
    module.mlp.down_proj.weight.mul_(1.5)
    after = [torch.equal(p.hidden, was.hidden) for p, was in zip(drafter.predict(tokens, seen), base, strict=True)]
    assert after == [True, False, False]


@pytest.mark.parametrize("modules", BOTH)
@torch.no_grad()
def test_below_each_node_of_a_tree_stands_what_a_chain_along_its_path_gives(modules: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter = drafter_for(target, modules)
    tokens, lengths = texts(2, 8), torch.tensor([6, 2])
    roots = tokens[torch.arange(2), lengths]
    memory = drafter.begin(target.observe(tokens[:, :6], torch.arange(6) < lengths[:, None], drafter.taps), roots)
    drafter.shape = TREE
    tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(tokens))
    for row in range(2):
        words: dict[tuple[int, ...], list[int]] = {(): []}
        for path, token in zip(TREE.paths, tree.tokens[row].tolist(), strict=True):
            words[path] = [*words[path[:-1]], token]
            forced = torch.tensor([[*words[path[:-1]], 0]]).expand(2, -1)
            ranked = forced_laws(drafter, memory, forced)[row, -1].argsort(descending=True)
            assert ranked[path[-1]] == token


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 3, 7)], ids=["chain", "tree"])
@pytest.mark.parametrize("modules", BOTH)
def test_e01_greedy_output_is_the_targets_in_any_batch(modules: str, shape: Shape) -> None:
    target = FrozenTarget(tiny_model())
    drafter = drafter_for(target, modules, shaken=False, depths=3)
    drafter.shape = shape
    prompts = [[5, 9, 3, 8, 1, 7], [4], [11, 3, 12]]
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 10}
    plain = [g.tokens for g in generate(target, None, prompts, **settings).generations]
    for size in (1, 3):
        run = generate(target, drafter, prompts, batch_size=size, **settings)
        assert [g.tokens for g in run.generations] == plain


def test_the_joint_law_of_the_first_three_tokens_is_the_targets_to_rounding() -> None:
    """A module each; one for all stands in the conformance suite."""
    target = exact_target(4)
    drafter = drafter_for(target, "each", depths=2).double()
    drafter.shape = Chain(2)
    assert joint(target, drafter, 3, [1, 2, 3]).error < EXACT


@pytest.mark.parametrize("modules", BOTH)
def test_t03_masked_positions_give_no_gradient_at_any_depth(modules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 % of the labels are masked, prompt and padding among them."""
    target = FrozenTarget(tiny_model())
    drafter = drafter_for(target, modules, depths=3)
    tokens = texts(2, 20)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    labels = tokens.masked_fill(~mask | (torch.arange(20) < 10) | (torch.arange(20) == 15), IGNORED)
    predictions = drafter.predict(tokens, seen := target.observe(tokens, mask, drafter.taps))
    leaves = [p._replace(hidden=p.hidden.detach().requires_grad_()) for p in predictions]
    monkeypatch.setattr(drafter, "predict", lambda *_: leaves)
    drafter(tokens, labels, Evidence(seen, target)).loss.backward()
    for leaf in leaves:
        assert leaf.hidden.grad is not None
        counted = law_positions(labels, leaf.shift).roll(-leaf.shift, 1)
        assert counted.any()
        assert torch.equal(leaf.hidden.grad.abs().amax(-1) > 0, counted)


def test_a_draft_deeper_than_there_are_modules_is_refused() -> None:
    target = FrozenTarget(tiny_model())
    drafter = drafter_for(target, "each", depths=2)
    memory = drafter.begin(target.observe(texts(1, 4), torch.ones(1, 4).bool(), drafter.taps), torch.tensor([5]))
    for shape in (Chain(3), DynamicTree(3, 2, 4)):
        drafter.shape = shape
        with pytest.raises(SpecdraftError, match="3 tokens below each other were asked of a drafter with 2"):
            drafter.propose(memory, warp=Warp(), dice=ForcedDice(texts(1, 4)))


def test_start_from_the_target_reads_the_hidden_state_alone_through_its_last_layer() -> None:
    target = FrozenTarget(tiny_model("gemma2"))
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 2)
    for module in drafter_for(target, "each", shaken=False, depths=2).stack:
        assert torch.equal(module.input_proj.weight, torch.cat([torch.eye(32), torch.zeros(32, 32)], 1))
        assert torch.equal(module.self_attn.q_proj.weight, target.layers[-1].self_attn.q_proj.weight)
        torch.testing.assert_close(module.final_layernorm.weight, target.final_norm.weight + 1)
    biased = FrozenTarget(AutoModelForCausalLM.from_config(Qwen2Config(**COMMON)).eval())
    with torch.no_grad():
        biased.layers[-1].self_attn.k_proj.bias.fill_(2)
    [module] = drafter_for(biased, "one", shaken=False).stack
    assert torch.equal(module.self_attn.k_proj.bias, biased.layers[-1].self_attn.k_proj.bias)


LAYER = {
    "token_layernorm.weight": (32,),
    "hidden_layernorm.weight": (32,),
    "input_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "final_layernorm.weight": (32,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("modules", "count"), [("one", 1), ("each", 3)])
def test_x10_x01_x02_names_and_shapes_are_mimos_and_come_back_bitwise(
    modules: str, count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model())
    saved = drafter_for(target, modules, depths=3).to(dtype=dtype)
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    golden = {f"model.mtp_layers.{j}.{name}": shape for j in range(count) for name, shape in LAYER.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == golden
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_nextn_predict_layers"], written["num_attention_heads"]) == (count, 4)
    loaded = load_drafter(tmp_path)
    assert type(loaded) is type(saved) is (MTPStackDrafter if modules == "each" else MTPDrafter)
    assert loaded.servable_config() == saved.servable_config()
    mine, theirs = saved.state_dict(), loaded.state_dict()
    assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in golden)
    loaded.attach(target)
    for one, other in zip(trained_laws(saved, texts(1, 9)), trained_laws(loaded, texts(1, 9)), strict=True):
        assert torch.equal(one, other)


def written_target(model: PreTrainedModel, folder: Path, shards: bool = False) -> FrozenTarget:
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")
    (folder / "tokenizer.json").write_text("{}")
    return FrozenTarget(AutoModelForCausalLM.from_pretrained(folder), name=str(folder))


def everything(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the index, from the file that it names."""
    found = {}
    for name, file in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items():
        with safe_open(folder / file, "pt") as stream:
            found[name] = stream.get_tensor(name)
    return found


@pytest.mark.parametrize("shards", [False, True], ids=["single", "shards"])
def test_x05_stitched_the_targets_tensors_are_bit_equal_and_the_modules_are_in_the_index(
    shards: bool, tmp_path: Path
) -> None:
    target = written_target(tiny_model(tie_word_embeddings=False), tmp_path / "target", shards)
    before = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    drafter = drafter_for(target, "one")
    drafter.save_pretrained(tmp_path / "drafter")
    stitch(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == before
    found = everything(tmp_path / "out")
    wanted = {**target.model.state_dict(), **drafter.state_dict()}
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in wanted.items())
    rest = [f"model.layers.{i}" for i in range(4)] + ["model.mtp_layers.0"]
    assert found.keys() == {f"{layer}.self_attn.{part}_proj.bias" for layer, part in product(rest, "qkv")}
    assert not any(bias.any() for bias in found.values())
    held = [name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)]
    assert sorted(held) == sorted(everything(tmp_path / "out")), "nothing stands in two files, or outside the index"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [tensor.nbytes for tensor in everything(tmp_path / "out").values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MiMoForCausalLM"], "qwen2")
    assert config["num_nextn_predict_layers"] == 1
    assert (tmp_path / "out" / "tokenizer.json").exists()
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), texts(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, target.model(tokens).logits, rtol=0, atol=1e-4)
    native = MTPDrafter.from_native(target, tmp_path / "out")
    assert native.config.qkv_bias, "the stitched checkpoint is one with native modules"
    for one, other in zip(trained_laws(drafter, tokens), trained_laws(native, tokens), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with pytest.raises(SpecdraftError, match="is there already"):
        stitch(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")


def test_what_mimos_layout_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    target = written_target(tiny_model("qwen3"), tmp_path / "target")
    drafter_for(target, "one").save_pretrained(tmp_path / "drafter")
    with pytest.raises(SpecdraftError, match="is of the type qwen3"):
        stitch(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    assert not (tmp_path / "out").exists()


NATIVE_NAMES = {
    "mimo": (
        "model.mtp_layers.{0}.",
        "model.mtp_layers.{0}.",
        0,
        "token_layernorm hidden_layernorm input_proj final_layernorm",
    ),
    "deepseek": ("model.layers.{0}.", "model.layers.{0}.", 4, "enorm hnorm eh_proj shared_head.norm"),
    "qwen": ("mtp.layers.{0}.", "mtp.", 0, "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
}
"""What precedes the decoder layer's names and the others, from which number on, and the others."""


class Plain(nn.Module):
    """An MTP module in transformers' own words, at depth 1: what a native module must compute."""

    def __init__(self, model: PreTrainedModel, family: str) -> None:
        super().__init__()
        self.family, kind = family, type(model.model.norm)
        self.layer = type(model.model.layers[0])(model.config, 0)
        self.token, self.hidden, self.final = (kind(32, eps=model.config.rms_norm_eps) for _ in range(3))
        self.fuse = nn.Linear(64, 32, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)
            weight.data += weight.dim() == 1

    def stored(self, index: int) -> dict[str, Tensor]:
        inner, outer, first, names = NATIVE_NAMES[self.family]
        parts = dict(zip(names.split(), (self.token, self.hidden, self.fuse, self.final), strict=True))
        found = {outer.format(first + index) + f"{name}.weight": part.weight for name, part in parts.items()}
        found |= {inner.format(first + index) + name: tensor for name, tensor in self.layer.state_dict().items()}
        one_plus = self.family == "qwen"
        return {
            name: (tensor - 1 if one_plus and "norm" in name else tensor).detach().clone()
            for name, tensor in found.items()
        }

    @torch.no_grad()
    def law(self, target: FrozenTarget, tokens: Tensor) -> Tensor:
        seen = target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), (target.num_layers,))
        read = seen.taps if self.family == "mimo" else seen.hidden  # MiMo's modules read it before the final norm
        embedded = target.embedding(tokens[:, 1:])
        if self.family != "qwen":
            embedded[:, 0] = 0
        parts = [self.token(embedded), self.hidden(read[:, :-1])]
        fused = self.fuse(torch.cat(parts[::-1] if self.family == "mimo" else parts, -1))
        positions = seen.positions[:, :-1]
        angles = target.body.rotary_emb(fused, positions)
        out = self.layer(fused, attention_mask=None, position_ids=positions, position_embeddings=angles)
        return target.head(self.final(out)).softmax(-1)


def native_target(family: str, kind: str, folder: Path, count: int = 1) -> tuple[FrozenTarget, list[Plain]]:
    """A target whose checkpoint brings `count` MTP modules, and what these are."""
    torch.manual_seed(2)
    qwen2 = Qwen2Config(**COMMON)
    model = AutoModelForCausalLM.from_config(qwen2).eval() if kind == "qwen2" else tiny_model(kind)
    plain = [Plain(model, family) for _ in range(count)]
    model.save_pretrained(folder)
    extra = {name: tensor for index, module in enumerate(plain) for name, tensor in module.stored(index).items()}
    if family == "deepseek":
        extra |= {"model.layers.4.embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
        extra |= {"model.layers.4.shared_head.head.weight": model.get_output_embeddings().weight.detach().clone()}
    save_file({**load_file(folder / "model.safetensors"), **extra}, folder / "model.safetensors", {"format": "pt"})
    return FrozenTarget(model, name=str(folder)), plain


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mimo", "qwen2"), ("deepseek", "llama"), ("deepseek", "qwen3"), ("qwen", "qwen3")],
)
def test_native_modules_compute_what_they_do_in_their_model_and_go_back_bit_for_bit(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    target, [plain] = native_target(family, kind, folder)
    drafter = drafter_for(target, "one", shaken=False, start="native")
    torch.testing.assert_close(
        trained_laws(drafter, texts(2, 9))[0][:, :-1], plain.law(target, texts(2, 9)), rtol=0, atol=1e-5
    )
    with torch.no_grad():
        drafter.stack[0].mlp.up_proj.weight += 1
    drafter.save_pretrained(tmp_path / "drafter")
    stitch(tmp_path / "drafter", folder, tmp_path / "out")
    was, now = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert was.keys() == now.keys()
    changed = [name for name in was if not torch.equal(was[name], now[name])]
    assert len(changed) == 1
    assert changed[0].endswith("mlp.up_proj.weight")
    torch.testing.assert_close(now[changed[0]], was[changed[0]] + 1)
    assert (folder / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("family", ["mimo", "deepseek"])
def test_several_native_modules_serve_a_depth_each(family: str, tmp_path: Path) -> None:
    target, plain = native_target(family, "llama", tmp_path, count=2)
    drafter = drafter_for(target, "each", shaken=False, start="native", depths=2)
    assert torch.equal(drafter.stack[1].mlp.up_proj.weight, plain[1].layer.mlp.up_proj.weight)
    tokens = texts(1, 12)
    want = trained_laws(drafter, tokens)
    memory = drafter.begin(target.observe(tokens[:, :6], torch.ones(1, 6).bool(), drafter.taps), tokens[:, 6])
    laws = forced_laws(drafter, memory, tokens[:, 7:9])
    for step in range(2):
        torch.testing.assert_close(laws[:, step], want[step][:, 5], rtol=0, atol=1e-5)
    with pytest.raises(SpecdraftError, match="brings 2 MTP modules: set modules: each and depths: 2"):
        drafter_for(target, "one", start="native")


UNLIKE = {
    "a mixture of experts": "model.layers.4.mlp.experts.0.up_proj.weight",
    "multi-head latent attention": "model.layers.4.self_attn.kv_a_proj_with_mqa.weight",
    "linear attention": "model.layers.4.linear_attn.in_proj.weight",
    "quantised weights": "model.layers.4.mlp.up_proj.weight_scale_inv",
    "tensors that such a layer has not": "model.layers.4.post_self_attn_layernorm.weight",
}


@pytest.mark.parametrize("reason", UNLIKE)
def test_native_modules_that_cannot_be_handled_are_refused_with_the_reason(reason: str, tmp_path: Path) -> None:
    target, _ = native_target("deepseek", "llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, UNLIKE[reason]: torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdraftError, match=f"have {reason}.*start: target"):
        MTPDrafter.from_native(target, tmp_path)


def test_a_native_start_without_modules_or_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    target, _ = native_target("deepseek", "llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.shared_head.head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SpecdraftError, match="is not the target's own"):
        MTPDrafter.from_native(target, tmp_path)
    written_target(tiny_model(), tmp_path / "without")
    with pytest.raises(SpecdraftError, match="has no MTP module"):
        MTPDrafter.from_native(target, tmp_path / "without")
