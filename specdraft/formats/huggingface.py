"""A draft LM as a plain Hugging Face folder with as many ids as its target, which engines demand of it.

Rows that it lacks are copies of its last one, of the embedding and of the head alike: an id that it does not know is
read as its last, as specdraft reads it, and is never likelier than it, so that greedy drafting, which takes the lower
id, passes over it. Rows beyond the target's are left out; no id of theirs was ever drafted.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdraft.causal import CausalLM
from specdraft.config import SpecdraftError
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.lm import LMConfig, LMDrafter, read_lm
from specdraft.formats.contents import Folder, Naming
from specdraft.target import FrozenTarget

_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


def recognise(folder: Folder) -> bool:
    """A causal LM's embedding, and no fusion layer that would make it a drafter's."""
    names = {name.removeprefix("model.") for name in folder.files}
    found = any(name.endswith(_EMBEDDINGS) for name in names)
    return found and "fc.weight" not in names and "speculators_model_type" not in folder.config


def write(drafter: TrainableDrafter, naming: Naming, out: Path) -> None:
    if not isinstance(drafter, LMDrafter):
        raise SpecdraftError(f"a {type(drafter).__name__} is no causal LM")
    size = naming.target.vocab_size
    if drafter.reader.vocab_size != size:
        model = _resized(drafter.lm, size)
        config = LMConfig(**{**drafter.config.to_dict(), "vocab_size": size})
        drafter = LMDrafter(config, CausalLM(model, drafter.reader.tokenizer, drafter.reader.name))
    drafter.save_pretrained(out)


def read(folder: Folder, target: FrozenTarget) -> TrainableDrafter:
    """Raises SpecdraftError on tensors that do not fit, or ids that mean other tokens than the target's."""
    drafter = LMDrafter.of(read_lm(str(folder.path)), target)
    if (own := folder.config.get("specdraft")) is not None:
        drafter.config.shared = min(drafter.config.shared, own["shared"])
        drafter.config.trained_length = own["trained_length"]
    return drafter.eval()


@torch.no_grad()
def _resized(lm: Any, size: int) -> Any:
    model = deepcopy(lm)
    had = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size, mean_resizing=False)
    if size > had:
        tables: list[nn.Module] = [model.get_input_embeddings(), model.get_output_embeddings()]
        for table in tables:
            for part in table.parameters(recurse=False):  # a head's bias too
                part[had:] = part[had - 1]
    return model.eval()
