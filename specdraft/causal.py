"""A causal LM as a reader of text: whole rows at once, or a batch of rows that grow at their own pace.

`CausalLM.head` turns last hidden states into logits where they are wanted. `Session` owns a batch's keys and values,
scores a whole tree in one forward pass, and keeps what was accepted, row by row.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdraft.config import SpecdraftError
from specdraft.kvcache import RowCache
from specdraft.packing import PackedLinear
from specdraft.tree import DraftTree
from specdraft.verify import Verdict


class Observation(NamedTuple):
    """What the target computed at some tokens, rows padded on the right."""

    tokens: Tensor
    """int64 [batch, time]"""
    mask: Tensor
    """bool [batch, time]: False for padding"""
    positions: Tensor
    """int64 [batch, time]: place in the row, the prompt's first token at 0"""
    hidden: Tensor
    """[batch, time, H]: the last hidden state, after the final norm"""
    taps: Tensor
    """[batch, time, len(taps) * H]: the outputs of the tapped layers, side by side in the order asked for"""


class CausalLM:
    """A transformers causal LM, in the mode and with the gradients that it has.

    Raises SpecdraftError at construction if the architecture cannot be handled (no plain stack of decoder layers,
    recurrent or chunked layers, an attention that takes no mask, logits that are not a function of the last hidden
    state), found by comparing with the model's own logits and a tree's forward with those of its paths.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str = "in-memory") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self._settings = self.config.to_dict()
        self.body = model.base_model
        self.layers = self._find_layers()
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.embedding = cast(nn.Embedding, model.get_input_embeddings())
        self.windows = self._attention_windows()
        self._check()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def _head(self) -> nn.Linear | PackedLinear:
        return cast(nn.Linear | PackedLinear, self.model.get_output_embeddings())  # packing may have replaced it

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token ids at which the target stops: those of its generation config, else of its config."""
        generation = self.model.generation_config
        found = generation.eos_token_id if generation is not None else None
        found = self.config.eos_token_id if found is None else found
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    @torch.no_grad()
    def observe(self, tokens: Tensor, mask: Tensor, taps: tuple[int, ...]) -> Observation:
        """Read whole rows: int64 [batch, time] and bool [batch, time], padded on the right; no logits are computed."""
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        with self.tapped(taps) as caught:
            hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        return Observation(tokens, mask, positions, hidden, _side_by_side(caught, hidden))

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Last hidden states [..., H] to the model's logits [..., V], its scaling and soft-capping included."""
        return self.finish(self._head(hidden.to(next(self._head.parameters()).device, self.dtype)))

    def session(self, taps: tuple[int, ...], batch: int) -> "Session":
        return Session(self, taps, batch)

    @contextmanager
    def tapped(self, taps: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """Catch the tapped layers' outputs, in the order of `taps`, of the forward pass made inside."""
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise SpecdraftError(f"tap {tap} is not a layer of {self.name}: allowed are 0 to {self.num_layers}")
        caught: dict[int, Tensor] = {}

        def catch_output(tap: int) -> Callable[[nn.Module, tuple, Any], None]:
            def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
                caught[tap] = output if isinstance(output, Tensor) else output[0]

            return hook

        def catch_input(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            caught[0] = args[0] if args else kwargs["hidden_states"]

        handles = [self.layers[tap - 1].register_forward_hook(catch_output(tap)) for tap in set(taps) if tap > 0]
        if 0 in taps:
            handles.append(self.layers[0].register_forward_pre_hook(catch_input, with_kwargs=True))
        ordered: list[Tensor] = []
        try:
            yield ordered
            ordered.extend(caught[tap] for tap in taps)
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def only(self, kept: Collection[int] | None) -> Iterator[None]:
        """Inside, a forward pass goes through the `kept` layers alone, counted from 1 (None: through all of them).

        The others hand on what they are given and stay in their places, by which a model tells its layers' masks.
        """
        places = [] if kept is None else [place for place in range(self.num_layers) if place + 1 not in kept]
        resting = {place: self.layers[place] for place in places}
        try:
            for place in resting:
                self.layers[place] = _HandsOn(self._in_tuples)
            yield
        finally:
            for place, layer in resting.items():
                self.layers[place] = layer

    def finish(self, logits: Tensor) -> Tensor:
        """Logit scaling (Cohere multiplies, Granite divides) and soft-capping (Gemma), as the config says."""
        if (scale := self._settings.get("logit_scale")) is not None:
            logits = logits * scale
        if (scaling := self._settings.get("logits_scaling")) is not None:
            logits = logits / scaling
        if (cap := self._settings.get("final_logit_softcapping")) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _find_layers(self) -> nn.ModuleList:
        stacks = [
            module
            for module in self.body.children()
            if isinstance(module, nn.ModuleList) and len(module) == self.config.num_hidden_layers
        ]
        if len(stacks) != 1 or self.model.get_output_embeddings() is None:
            raise SpecdraftError(
                f"{self.name} ({type(self.model).__name__}) cannot be a target: specdraft handles a decoder-only "
                f"causal LM with one stack of {self.config.num_hidden_layers} layers and an output head"
            )
        return stacks[0]

    def _attention_windows(self) -> dict[str, int | None] | int | None:
        """Sliding windows by layer type where the model takes a mask for each type; else the one window, or None."""
        window = self._settings.get("sliding_window")
        kinds = self._settings.get("layer_types")
        if kinds is None:
            return window
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise SpecdraftError(
                f"{self.name} has layers of type {', '.join(sorted(unknown))}, whose state cannot be rolled back after "
                "a rejected draft; handled are full_attention and sliding_attention"
            )
        return {"full_attention": None, "sliding_attention": window}

    def _check(self) -> None:
        """Raise unless, on a probe, `head` gives the model's logits and a tree's forward is that of its paths."""
        seed = torch.Generator().manual_seed(0)
        probe = torch.randint(0, self.vocab_size, (2, 12), generator=seed).to(self.device)
        everything = torch.ones_like(probe, dtype=torch.bool)
        forms: list[type] = []
        hook = self.layers[0].register_forward_hook(lambda _module, _args, output: forms.append(type(output)))
        with torch.no_grad():
            want = self.model(input_ids=probe, use_cache=False).logits.float()
        hook.remove()
        self._in_tuples = forms[0] is not torch.Tensor
        got = self.head(self.observe(probe, everything, ()).hidden).float()
        tolerance = (1e-4 if self.dtype == torch.float32 else 5e-2) * want.abs().max().item()
        if not torch.allclose(got, want, rtol=0, atol=tolerance):
            raise SpecdraftError(
                f"{self.name} ({type(self.model).__name__}): its logits are not its output head over the last hidden "
                f"state (they differ by {(got - want).abs().max():.2e}); such a model cannot be a target"
            )
        prompt = everything.clone()
        prompt[:, 8:], prompt[1, 6:] = False, False
        lengths = prompt.sum(1)
        rows = torch.arange(2, device=self.device)
        path = torch.stack([probe[rows, lengths + step] for step in range(3)], 1)
        # root -> a wrong guess (node 0) beside the right one (node 1), and node 2 below node 1
        tokens = torch.stack([(path[:, 1] + 1) % self.vocab_size, path[:, 1], path[:, 2]], 1)
        parents = torch.tensor([[-1, -1, 1]], device=self.device).expand(2, -1)
        tree = DraftTree.chosen(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
        try:
            session = self.session((), 2)
            session.read(probe[:, :8], prompt[:, :8])
            seen = session.extend(path[:, 0], tree)
        except Exception as error:  # whatever a strange architecture raises, it is the reason
            raise SpecdraftError(
                f"{self.name} ({type(self.model).__name__}) cannot be a target: it does not take a cache of its keys "
                f"and values and a tree's attention mask ({error!r})"
            ) from error
        got = self.head(seen.hidden[:, [0, 2, 3]]).float()
        want = torch.stack([want[rows, lengths + step] for step in range(3)], 1)
        if not torch.allclose(got, want, rtol=0, atol=tolerance):
            raise SpecdraftError(
                f"{self.name} ({type(self.model).__name__}, attention {self.config._attn_implementation}): a tree's "
                f"forward pass differs from its paths' by {(got - want).abs().max():.2e}; it cannot be verified"
            )


class _HandsOn(nn.Module):
    """Stands for a decoder layer that a pass leaves out, and answers in the form in which that layer would."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, hidden_states: Tensor, *_args: Any, **_settings: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.in_tuple else hidden_states


def _side_by_side(caught: Sequence[Tensor], hidden: Tensor) -> Tensor:
    if not caught:
        return hidden.new_empty(*hidden.shape[:-1], 0)
    return torch.cat([tap.to(hidden.device) for tap in caught], -1)


class Session:
    """A model's reading of a batch of rows, each of a length of its own, with its keys and values."""

    def __init__(self, reader: CausalLM, taps: tuple[int, ...], batch: int) -> None:
        self.reader = reader
        self.taps = taps
        self.cache = RowCache(batch, reader.device)
        self._extended: Observation | None = None
        self._scratch = self.cache.lengths.new_empty(batch, 0)  # positions of what was grown and not committed

    @torch.no_grad()
    def read(self, tokens: Tensor, mask: Tensor) -> Observation:
        """Read and commit tokens, int64 and bool [batch, time], padded on the right: the prompts, first of all."""
        tokens, mask = tokens.to(self.reader.device), mask.to(self.reader.device)
        time = torch.arange(tokens.shape[1], device=tokens.device)
        causal = (time[:, None] >= time).expand(len(tokens), -1, -1)
        seen = self.grow(tokens, time.expand_as(tokens), causal)._replace(mask=mask)
        self.cache.commit(time.expand_as(tokens), mask.sum(1))
        self._scratch = self._scratch[:, :0]
        return seen

    @torch.no_grad()
    def grow(
        self, tokens: Tensor, depths: Tensor, attends: Tensor, layers: Collection[int] | None = None
    ) -> Observation:
        """One forward pass over new scratch tokens, int64 [batch, new].

        `depths` int64 [batch, new]: how far behind the committed tokens each stands, from 0; `attends` bool
        [batch, new, scratch]: which scratch tokens, older ones first, then the new ones, each sees, itself included.
        `layers`: the layers that read them, see `CausalLM.only`; scratch is to be read by the same ones until it is
        discarded, and only what all layers have read can be committed.
        """
        reader, windows, cache = self.reader, self.reader.windows, self.cache
        positions = cache.lengths[:, None] + depths
        self._scratch = torch.cat([self._scratch, positions], 1)
        masks: Any = None  # a first reading is plainly causal, and the model's own causal path is the quickest
        if cache.width > 0:
            if isinstance(windows, dict):
                masks = {kind: self._mask(positions, attends, window) for kind, window in windows.items()}
            else:
                masks = self._mask(positions, attends, windows)
        with reader.only(layers), reader.tapped(self.taps) as caught:
            hidden = reader.body(
                input_ids=tokens, attention_mask=masks, position_ids=positions, cache=cache, use_cache=True
            ).last_hidden_state
        everything = torch.ones_like(tokens, dtype=torch.bool)
        return Observation(tokens, everything, positions, hidden, _side_by_side(caught, hidden))

    def _mask(self, positions: Tensor, attends: Tensor, window: int | None) -> Tensor:
        if window is not None:
            attends = attends & (positions[:, :, None] - self._scratch[:, None, :] < window)
        return self.cache.mask(positions, attends, self.reader.dtype, window)

    def extend(self, roots: Tensor, tree: DraftTree) -> Observation:
        """One forward pass over each row's root and the tree below it.

        `roots` int64 [batch]. Returns [batch, 1 + nodes]: index 0 is the root, index 1 + i is node i.
        """
        tokens = torch.cat([roots[:, None], tree.tokens], 1)
        depths = torch.cat([torch.zeros_like(roots)[:, None], tree.depths], 1)
        present = torch.cat([torch.ones_like(roots, dtype=torch.bool)[:, None], tree.present], 1)
        self._extended = self.grow(tokens, depths, tree.attends())._replace(mask=present)
        return self._extended

    @torch.no_grad()
    def commit(self, verdict: Verdict) -> Observation:
        """Keep the root and the accepted nodes of each row, drop the others.

        Returns what was kept, [batch, 1 + most accepted], padded on the right.
        """
        assert self._extended is not None, "commit follows extend"
        extended, self._extended = self._extended, None
        most = int(verdict.accepted.max())
        mask = torch.arange(most + 1, device=verdict.accepted.device) <= verdict.accepted[:, None]
        kept = torch.cat([torch.zeros_like(verdict.accepted)[:, None], verdict.path[:, :most] + 1], 1)
        kept = torch.where(mask, kept, 0)
        self.cache.commit(kept, verdict.accepted + 1)
        self._scratch = self._scratch[:, :0]
        rows = torch.arange(len(kept), device=kept.device)[:, None]
        tokens, positions = extended.tokens[rows, kept], extended.positions[rows, kept]
        return Observation(tokens, mask, positions, extended.hidden[rows, kept], extended.taps[rows, kept])

    def discard(self) -> None:
        """Forget what was grown and not committed."""
        self.cache.discard()
        self._scratch = self._scratch[:, :0]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with `rows` alone, in that order; what was grown and not committed is forgotten."""
        self.cache.keep(rows)
        self._scratch = self._scratch[: len(rows), :0]
