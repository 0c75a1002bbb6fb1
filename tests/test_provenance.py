import hashlib
from pathlib import Path

import pytest
from toy_stage import Toy

import specdraft
from specdraft.config import SpecdraftError
from specdraft.provenance import FILE_NAME, Provenance, hash_file


def test_it_holds_what_is_needed_to_make_the_artifact_again_and_reads_back(tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_bytes(b"{}\n")
    made = Provenance.of(Toy(), seed=7, target="toy", fingerprint="abc", data=[data])
    assert made.write(tmp_path) == tmp_path / FILE_NAME
    assert Provenance.read(tmp_path) == made
    assert made.data == {str(data): f"sha256:{hashlib.sha256(b'{}' + bytes([10])).hexdigest()}"}
    assert made.specdraft == specdraft.__version__
    assert made.recipe["training"]["learning_rate"] == 2e-3
    assert "torch" in made.packages
    assert made.git is None or len(made.git.removesuffix("+changes")) == 40


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match=r"gone\.jsonl: cannot be read"):
        hash_file(tmp_path / "gone.jsonl")
    with pytest.raises(SpecdraftError, match="no readable provenance"):
        Provenance.read(tmp_path)
