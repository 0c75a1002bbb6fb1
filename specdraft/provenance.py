"""What made an artifact: enough to make it again, and to tell two runs apart. Written as `specdraft.json`."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import specdraft
from specdraft.config import Recipe, SpecdraftError

FILE_NAME = "specdraft.json"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "deepspeed")


@dataclass(frozen=True)
class Provenance:
    """One file beside every artifact; `of` gathers it, `write` and `read` keep it."""

    date: str  # UTC, ISO 8601, to the second
    specdraft: str  # this package's version
    git: str | None  # commit of the checkout that ran, "+changes" if it had any; None outside a checkout
    python: str
    platform: str
    packages: dict[str, str]  # versions of those of PACKAGES that are installed
    seed: int
    target: str  # the target's id: Hub name or folder, as the recipe gives it
    target_fingerprint: str  # of its weights and config: FrozenTarget.fingerprint
    data: dict[str, str]  # file as the recipe names it -> "sha256:..." of its bytes
    recipe: dict[str, Any]  # resolved, defaults included

    @classmethod
    def of(cls, recipe: Recipe, *, seed: int, target: str, fingerprint: str, data: Sequence[Path]) -> "Provenance":
        """Gather it now. Raises SpecdraftError for a data file that cannot be read."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            specdraft=specdraft.__version__,
            git=_git_commit(Path(__file__).parent),
            python=platform.python_version(),
            platform=platform.platform(),
            packages=_versions(),
            seed=seed,
            target=target,
            target_fingerprint=fingerprint,
            data={str(path): hash_file(path) for path in data},
            recipe=recipe.model_dump(mode="json"),
        )

    @classmethod
    def of_conversion(cls, recipe: Recipe, source: Path, *, target: str, fingerprint: str) -> "Provenance":
        """Of a checkpoint that is made from the one in `source`; how that came about, where it is known, stands under
        `recipe.drafter_made`."""
        files = [*sorted(source.glob("*.safetensors")), source / "config.json"]
        made = cls.of(recipe, seed=0, target=target, fingerprint=fingerprint, data=files)
        if not (source / FILE_NAME).exists():
            return made
        before = json.loads((source / FILE_NAME).read_text(encoding="utf-8"))
        return replace(made, recipe={**made.recipe, "drafter_made": before})

    def write(self, folder: Path) -> Path:
        path = folder / FILE_NAME
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, folder: Path) -> "Provenance":
        """Raises SpecdraftError when `folder` holds none that can be read."""
        path = folder / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise SpecdraftError(f"{path}: no readable provenance ({error}); was {folder} written by this?") from error


def hash_file(path: Path) -> str:
    """ "sha256:" and the hex digest of the file's bytes. Raises SpecdraftError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise SpecdraftError(f"{path}: cannot be read ({error})") from error


def hash_weights(folder: Path) -> str:
    """ "sha256:" and the hex digest of a checkpoint's safetensors file, as `sha256sum` and the Hub give it; of several,
    the digest of their names and digests. Raises SpecdraftError if there is none."""
    files = {path.name: hash_file(path) for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise SpecdraftError(f"{folder} has no .safetensors file")
    return digest_of(files)


def digest_of(files: Mapping[str, str]) -> str:
    """What `hash_weights` says of files with these names and hashes."""
    if len(files) == 1:
        return next(iter(files.values()))
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def _versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _git_commit(folder: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a checkout around site-packages is not ours
        commit = git("rev-parse", "HEAD")
        return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None
