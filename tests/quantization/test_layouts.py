"""Quantised drafters in the engines' layouts: they travel as they are, or are refused."""

from pathlib import Path

import pytest
import torch
from models import tiny_model
from quantized import in_integers, trained

from specdraft import lowbit
from specdraft.config import SpecdraftError
from specdraft.drafters.base import read_servable
from specdraft.formats import FORMATS, Folder, Naming
from specdraft.target import FrozenTarget


@pytest.mark.parametrize("scheme", ["w8a8", "int4"])
@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle3", "safeailab"), ("eagle3", "speculators"), ("eagle1", "eagle1-vllm")]
)
def test_q01_integers_come_through_a_layout_bit_for_bit_with_their_own_config(
    kind: str, layout: str, scheme: str, tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model())
    drafter = in_integers(trained(kind, target), scheme)
    FORMATS[layout].write(drafter, Naming(target, "the-target"), tmp_path / "out")
    assert lowbit.config_of(drafter).items() <= read_servable(tmp_path / "out").items()
    again = FORMATS[layout].read(Folder(tmp_path / "out"), target)
    mine, read = drafter.state_dict(), again.state_dict()
    assert mine.keys() == read.keys()
    assert all(mine[name].dtype == read[name].dtype and torch.equal(mine[name], read[name]) for name in mine)
    assert lowbit.config_of(again) == lowbit.config_of(drafter)


def test_a_layout_whose_readers_take_no_integers_refuses_them_and_writes_nothing(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model())
    with pytest.raises(SpecdraftError, match="quantised layers are not loaded in this layout"):
        FORMATS["medusa-vllm"].write(
            in_integers(trained("medusa", target), "w8a8"), Naming(target, "t"), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()
