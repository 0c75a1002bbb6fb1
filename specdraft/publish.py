"""`specdraft publish`: a drafter with the reports that measured it, on the Hugging Face Hub.

What is published is gathered in a folder first: the checkpoint's own files (safetensors and JSON, never pickles or
code), a model card rendered from the reports, the reports, their plots, and the provenance, all without a path of this
machine. Nothing is sent before `upload` says so. The Hub's token is huggingface_hub's affair: no setting takes it, and
nothing here reads or prints it.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id
from pydantic import Field, field_validator, model_validator
from rich.console import Console

from specdraft import card
from specdraft.card import Data, Measured, Publication
from specdraft.config import Recipe, SpecdraftError
from specdraft.evaluation.report import Report
from specdraft.formats import FORMATS, Folder
from specdraft.formats.mtp import link
from specdraft.provenance import FILE_NAME, digest_of, hash_weights
from specdraft.quantization.report import FILE_NAME as COMPARISON
from specdraft.quantization.report import QuantizeReport

log = logging.getLogger(__name__)

CARD = "README.md"
_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
"""The files of a checkpoint; all else stays here."""
_REPLACED = (*_MODEL, FILE_NAME, "report*.json", "quantize.*", "plots/*")
"""What an earlier publication left and this one may not have: shards, reports, plots."""
_OF_THE_TARGET = ("name_or_path", "base_model_name_or_path")
_PLACES = ("_name_or_path", *_OF_THE_TARGET, "tokenizer_file")
"""Keys of config.json and tokenizer_config.json that say where something lay."""


class VariantRecipe(Recipe):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its branch or folder in the repository: int8, int4, bf16."""
    folder: Path
    """The checkpoint."""
    reports: tuple[Path, ...] = Field(min_length=1)
    """The `report.json` files of evaluations of exactly these weights."""


class PublishRecipe(Recipe):
    folder: Path
    """The drafter: what `train`, `import` or `export` wrote."""
    reports: tuple[Path, ...] = Field(min_length=1)
    """The `report.json` files that `eval` wrote of exactly these weights; the card's headline is the first one's."""
    repo: str
    """Where to: owner/name on the Hub."""
    base_model: str | None = None
    """The target's name on the Hub, for the card and its commands. Unset: the target as the reports name it."""
    base_revision: str | None = None
    """The target's commit on the Hub. Unset: as the training recipe has it, if it has."""
    variants: tuple[VariantRecipe, ...] = ()
    """More checkpoints of the same drafter, quantised ones for instance."""
    variants_as: Literal["revisions", "folders"] = "revisions"
    """Engines load a branch by its name; of folders they load only what was downloaded before."""
    licence: str
    """Of the drafter, as the Hub names licences: apache-2.0, mit, llama3.1, ..."""
    data: tuple[Data, ...] = ()
    """Where the training data came from, and under which licence."""
    languages: tuple[str, ...] = ()
    """Of the training data: ISO 639 codes."""
    tags: tuple[str, ...] = ()
    """Further tags; method, engines and library are tagged anyway."""
    private: bool = False
    """Only the owner sees the repository. One that is public already is refused."""
    samples: bool = False
    """Publish the prompts and answers that the reports show."""
    commit_message: str = "A drafter, measured"
    """Of the commits."""
    output: Path | None = None
    """Keep what is, or would be, uploaded in this folder, which must not be there yet."""
    upload: bool = False
    """Upload. Without it everything is prepared, listed and shown, and nothing leaves this machine."""

    @field_validator("repo", "base_model")
    @classmethod
    def _on_the_hub(cls, name: str | None) -> str | None:
        if name is not None and not is_hub_name(name):
            raise ValueError(f"{name!r} is no owner/name of the Hub")
        return name

    @model_validator(mode="after")
    def _no_idle_setting(self) -> Self:
        if "variants_as" in self.model_fields_set and not self.variants:
            raise ValueError("variants_as has no effect without variants")
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names) or {"main", "plots"} & set(names):
            raise ValueError(f"variants need names of their own, other than main and plots; they are {names}")
        return self


def publish(recipe: PublishRecipe) -> dict[str, Any]:
    """Prepare everything, show it, and upload it where the recipe says so.

    Raises SpecdraftError if no report measured exactly these weights, if something of this machine would be published,
    if a private repository was asked for and a public one is there, or if the Hub refuses.
    """
    main = measured(recipe.folder, recipe.reports)
    variants = {variant.name: measured(variant.folder, variant.reports) for variant in recipe.variants}
    publication = _publication(recipe, main, variants)
    with _stage(recipe.output) as stage:
        branches = list(gather(publication, recipe.samples, stage))
        console = Console(stderr=True)
        for branch in branches:
            _show(branch, console)
        if recipe.upload:
            where = _send(recipe, branches)
        else:
            where = f"nothing was uploaded to {recipe.repo}: look at it, then set upload=true"
            log.info(where)
        files = {name: sorted(str(path.relative_to(folder)) for path in _files(folder)) for name, folder in branches}
    weights = {"main": main.weights, **{name: one.weights for name, one in variants.items()}}
    return {"repo": recipe.repo, "uploaded": recipe.upload, "where": where, "weights": weights, "files": files}


def is_hub_name(name: str) -> bool:
    """Whether it is owner/name, and no folder of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not name.startswith(".") and not Path(name).exists()


def measured(folder: Path, paths: tuple[Path, ...]) -> Measured:
    """A checkpoint with the reports that measured exactly its weights.

    Raises SpecdraftError if one did not, or if the folder is no checkpoint.
    """
    files = Folder(folder)
    made = json.loads((folder / FILE_NAME).read_text(encoding="utf-8")) if (folder / FILE_NAME).exists() else None
    own, reports = hash_weights(folder), [Report.load(path) for path in paths]
    same = {own, *_exported_from(made, own)}
    for path, report in zip(paths, reports, strict=True):
        found = report.setting.drafter_weights
        if found not in same:
            says = "does not say which weights it measured" if found is None else f"measured {found}"
            raise SpecdraftError(
                f"{path} {says}; {folder} holds {own}. A card shows only what was measured of exactly the weights that "
                "are published: run `specdraft eval` on this very folder, and give that report"
            )
    if len(prints := {report.setting.target_fingerprint for report in reports}) > 1:
        raise SpecdraftError(f"the reports are of {len(prints)} different targets: {', '.join(sorted(prints))}")
    layouts = [name for name, layout in FORMATS.items() if layout.recognise(files)]
    size = sum(path.stat().st_size for path in set(files.files.values()))
    layout = layouts[0] if len(layouts) == 1 else None
    return Measured(folder, files.config, layout, own, size, made, reports, _comparison(folder))


def _comparison(folder: Path) -> QuantizeReport | None:
    path = folder / COMPARISON
    return QuantizeReport.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


def _exported_from(made: dict[str, Any] | None, own: str) -> set[str]:
    """The weights of which these are a bit-exact copy in another layout, as `export` wrote it."""
    recipe = {} if made is None else made["recipe"]
    layout = FORMATS.get(recipe.get("format") or "")
    copied = layout is not None and layout.exact and recipe.get("dtype") == "auto" and recipe.get("written") == own
    if made is None or not copied:
        return set()
    shards = {Path(name).name: digest for name, digest in made["data"].items() if name.endswith(".safetensors")}
    return {digest_of(shards)} if shards else set()


def _publication(recipe: PublishRecipe, main: Measured, variants: dict[str, Measured]) -> Publication:
    """Raises SpecdraftError where the target's name on the Hub is not known, or a variant is of another target."""
    setting = main.reports[0].setting
    for name, variant in variants.items():
        other = variant.reports[0].setting.target_fingerprint
        if other != setting.target_fingerprint:
            raise SpecdraftError(f"the variant {name} was measured on another target ({other}) than the drafter")
    base = recipe.base_model or setting.target
    if not is_hub_name(base):
        raise SpecdraftError(
            f"the reports name the target {base!r}, which nobody else can load: set base_model to its name on the Hub"
        )
    trained = card.training_recipe(main.made)
    return Publication(
        repo=recipe.repo,
        base_model=base,
        base_revision=recipe.base_revision or (trained.get("target") or {}).get("revision"),
        main=main,
        variants=variants,
        as_folders=recipe.variants_as == "folders",
        licence=recipe.licence,
        data=recipe.data,
        languages=recipe.languages,
        tags=recipe.tags,
    )


class Branch(NamedTuple):
    """What one branch of the repository is to hold."""

    name: str
    folder: Path


def gather(publication: Publication, samples: bool, stage: Path) -> Iterator[Branch]:
    """Write each branch's files into a folder of `stage`. Raises SpecdraftError for what must not be published."""
    branches = {"main": publication.main} | ({} if publication.as_folders else publication.variants)
    for name, one in branches.items():
        out = stage / name
        _checkpoint(publication, one, samples, out)
        if publication.as_folders:
            for inside, variant in publication.variants.items():
                _checkpoint(publication, variant, samples, out / inside)
        plots = card.draw(one.reports[0], out / "plots")
        (out / CARD).write_text(card.render(publication, None if name == "main" else name, plots), encoding="utf-8")
        _refuse_places(out)
        yield Branch(name, out)


def _checkpoint(publication: Publication, one: Measured, samples: bool, out: Path) -> None:
    """The files of one checkpoint, with its provenance and its reports."""
    out.mkdir(parents=True)
    for path in sorted({path for pattern in _MODEL for path in one.folder.glob(pattern)}):
        link(path, out / path.name) if path.suffix == ".safetensors" else shutil.copyfile(path, out / path.name)
    for name, target in (("config.json", publication.base_model), ("tokenizer_config.json", None)):
        if (out / name).exists():
            _write(out / name, _placed(json.loads((out / name).read_text(encoding="utf-8")), target))
    if one.made is not None:
        _write(out / FILE_NAME, card.public(one.made, publication.names))
    if one.quantised is not None:
        card.public_comparison(one.quantised, publication).write(out)
    for number, report in enumerate(one.reports, 1):
        name = "report.json" if number == 1 else f"report-{number}.json"
        card.public_report(report, publication, samples).save(out / name)


def _placed(config: dict[str, Any], target: str | None) -> dict[str, Any]:
    """A config whose keys for places name what anyone can load: the target's say `target`, all others are left out."""
    placed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            placed[key] = _placed(value, target)
        elif key not in _PLACES or value is None or is_hub_name(str(value)):
            placed[key] = value
        elif target is not None and key in _OF_THE_TARGET:
            placed[key] = target
    return placed


def _refuse_places(out: Path) -> None:
    """The last gate: a file that names a folder of this machine is not published."""
    here = [str(path) for path in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())) if len(path.parts) > 1]
    for path in _files(out):
        if path.suffix != ".safetensors":
            text = path.read_text(encoding="utf-8", errors="replace")
            if found := [place for place in here if f"{place}/" in text]:
                raise SpecdraftError(
                    f"{path.relative_to(out)} names {found[0]}, a folder of this machine, and would be published: "
                    "take that out of the checkpoint or of the reports"
                )


@contextmanager
def _stage(output: Path | None) -> Iterator[Path]:
    if output is not None:
        if output.exists():
            raise SpecdraftError(f"{output} is there already: remove it, or name another output")
        output.mkdir(parents=True)
        try:
            yield output
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise
        return
    with tempfile.TemporaryDirectory(prefix="specdraft-publish-") as name:
        yield Path(name)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _show(branch: Branch, console: Console) -> None:
    console.print(f"\n[bold]{branch.name}[/bold]")
    for path in sorted(_files(branch.folder)):
        console.print(f"{path.stat().st_size:>14,}  {path.relative_to(branch.folder)}", highlight=False)
    if branch.name == "main":
        console.print(f"\n{(branch.folder / CARD).read_text(encoding='utf-8')}", markup=False, highlight=False)


def _send(recipe: PublishRecipe, branches: list[Branch]) -> str:
    """Create the repository if need be and commit every branch; its address."""
    api = HfApi(library_name="specdraft")
    try:
        address = api.create_repo(recipe.repo, private=recipe.private, exist_ok=True)
        if recipe.private and not api.repo_info(recipe.repo).private:
            raise SpecdraftError(f"{address} is public already, and private was asked for: nothing was uploaded")
        for branch in branches:
            if branch.name != "main":
                api.create_branch(recipe.repo, branch=branch.name, exist_ok=True)
            inside = [f"{variant.name}/*" for variant in recipe.variants if recipe.variants_as == "folders"]
            api.upload_folder(
                repo_id=recipe.repo,
                folder_path=branch.folder,
                revision=branch.name,
                commit_message=recipe.commit_message,
                delete_patterns=[*_REPLACED, *inside],
            )
    except (HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        raise SpecdraftError(f"the Hub did not take {recipe.repo}: {error}") from error
    return str(address)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
