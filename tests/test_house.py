"""The rules of the house that a machine can check: import order, purity, sizes, configs, README, prompts."""

import ast
import functools
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from json import loads
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdraft.cli import STAGES, app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specdraft"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports only from those left of it; a folder is one place in the line.
ORDER = (
    "config progress provenance theory warping controls dice tree verify witness reliability objectives reduction "
    "attention packing lowbit kvcache causal target data drafters formats decoding evaluation trainer training "
    "quantization export serving card publish cli"
).split()
PURE = "theory warping dice tree verify witness reliability objectives reduction attention".split()
IMPURE = {"pathlib", "os", "io", "json", "yaml", "omegaconf", "pydantic", "datasets", "accelerate", "safetensors"}
SHARED_BY_DRAFTERS = set(
    "base blocks heads lowbit_lm mtp_native proposals recurrence several shapes vocabulary".split()
)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, absolute, function-level imports included."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import; name the module in full"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[tuple[str, ...]]:
    """What a file imports of the package: ("drafters", "base", ...)."""
    found = {tuple(name.split(".")[1:]) for name in imports(path) if name.split(".")[0] == "specdraft"}
    return {parts for parts in found if parts and not parts[0].startswith("__")}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_go_one_way(path: Path) -> None:
    place = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if place == "__init__":
        assert not ours(path), "the package itself only holds the words"
        return
    assert place in ORDER, f"give {place} its place in ORDER and in the design"
    for parts in ours(path):
        if parts[0] != place:
            assert parts[0] in ORDER[: ORDER.index(place)], (
                f"{path.name} imports {'.'.join(parts)}, which comes after it"
            )


@pytest.mark.parametrize("path", sorted((PACKAGE / "drafters").glob("[!_]*.py")), ids=ids)
def test_drafters_never_import_each_other(path: Path) -> None:
    siblings = {parts[1] for parts in ours(path) if parts[0] == "drafters" and len(parts) > 1}
    assert siblings <= SHARED_BY_DRAFTERS - {path.stem}


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_model_no_file_and_no_config(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    assert {parts[0] for parts in ours(path)} <= set(PURE)
    assert not {module.split(".")[0] for module in imports(path)} & IMPURE
    called = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    assert "open" not in called


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_files_and_functions_keep_their_size(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, "a file of more than 400 lines is two things"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


def test_every_third_party_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["deepspeed"], *extras["serve"]]
    names = {re.split(r"[\[=<>~! ]", line)[0].lower().replace("_", "-") for line in declared}
    owners = importlib.metadata.packages_distributions()
    for path in MODULES:
        for module in {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"specdraft"}:
            owner = {name.lower().replace("_", "-") for name in owners.get(module, [module])}
            assert owner & names, f"{path.name} imports {module}, which pyproject.toml does not declare"


def stage_of(config: Path) -> str:
    """configs/respond-X.yaml is a recipe of `respond`; a name that begins with no verb is one of `train`."""
    verb = config.name.split("-")[0]
    return verb if verb in STAGES else "train"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=ids)
def test_every_config_loads(path: Path) -> None:
    folder = path.relative_to(ROOT / "configs").parts[0]
    if folder in ("accelerate", "deepspeed"):
        from accelerate.commands.config.config_args import load_config_from_file

        load_config_from_file(str(path))
        return
    layers = [ROOT / "configs" / path.name, path] if folder == "quick" else [path]
    options = [word for layer in layers for word in ("--config", str(layer))]
    result = CliRunner().invoke(app, [stage_of(path), *options, "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.json")), ids=ids)
def test_every_json_config_is_json(path: Path) -> None:
    assert isinstance(loads(path.read_text(encoding="utf-8")), dict)


def commands() -> list[str]:
    """The commands of the shell blocks of README.md and CONTRIBUTING.md, continued lines joined, comments dropped."""
    found = []
    for name in ("README.md", "CONTRIBUTING.md"):
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_documented_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    subprocess.run(["bash", "-n", "-c", command], check=True)
    words = shlex.split(command, comments=True)
    words = words[next(place for place, word in enumerate(words) if "=" not in word) :]  # after VARIABLE=value
    script = next((place for place, word in enumerate(words) if word.startswith("recipes/")), None)
    if words[0].startswith("scripts/"):
        assert (ROOT / words[0]).stat().st_mode & 0o100, f"{words[0]} is not an executable file"
    elif words[0] == "specdraft" and words[1] in STAGES:
        arguments = words[1:] if "--help" in words else [*words[1:], "--dry-run"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    elif script is not None:
        result = CliRunner().invoke(app, [verb_of(ROOT / words[script]), *words[script + 1 :], "--dry-run"])
        assert result.exit_code == 0, result.output
        launcher = words[:script]
        if "--config_file" in launcher:
            assert (ROOT / launcher[launcher.index("--config_file") + 1]).is_file()
    else:
        assert words[0] in ("pip", "python", "git", "specdraft"), f"no way to check {command!r}"


def verb_of(script: Path) -> str:
    """The stage that a recipe script hands over to: the string in its `launch("...")`."""
    calls = [node for node in ast.walk(tree(script)) if isinstance(node, ast.Call)]
    (verb,) = [call.args[0].value for call in calls if isinstance(call.func, ast.Name) and call.func.id == "launch"]  # type: ignore[attr-defined]
    return str(verb)


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").glob("*.py")), ids=ids)
def test_recipe_scripts_only_hand_over(script: Path) -> None:
    assert verb_of(script) in STAGES
    assert len(script.read_text(encoding="utf-8").splitlines()) < 20


def test_nothing_names_the_machine_it_was_written_on() -> None:
    forbidden = re.compile("|".join(f"/{name}/" for name in ("work", "root", "home", "Users")))
    suffixes = {".py", ".md", ".yaml", ".json", ".toml", ".txt", ".jinja", ".jsonl", ".sh", ""}
    parts = [ROOT / name for name in ("specdraft", "recipes", "configs", "scripts", "tests", "prompts", ".ci")]
    files = [path for part in parts for path in part.rglob("*") if "__pycache__" not in path.parts]
    for path in [*files, *ROOT.glob("*.md"), *ROOT.glob("*.t*")]:
        if path.is_file() and path.suffix in suffixes:
            assert not forbidden.search(path.read_text(encoding="utf-8")), f"{ids(path)} holds a path of one machine"


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def trigrams(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[place : place + 3]) for place in range(max(1, len(words) - 2))}


@functools.cache
def prompts(name: str) -> list[dict[str, str]]:
    lines = (ROOT / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [loads(line) for line in lines]


def test_prompts_are_even_over_the_categories_also_in_every_prefix() -> None:
    kinds = {"chat", "reasoning", "code", "maths", "summarising", "extraction", "translation"}
    for name, count in (("train", 420), ("held_out", 42)):
        rows = prompts(name)
        assert len(rows) == count
        for start in range(0, count, len(kinds)):
            assert {row["category"] for row in rows[start : start + len(kinds)]} == kinds


def test_held_out_prompts_are_not_training_prompts() -> None:
    train = [row["prompt"] for row in prompts("train")]
    seen = {" ".join(words_of(prompt)) for prompt in train}
    assert len(seen) == len(train), "a training prompt stands there twice"
    for row in prompts("held_out"):
        assert " ".join(words_of(row["prompt"])) not in seen
        mine = trigrams(row["prompt"])
        nearest = max(train, key=lambda prompt: len(mine & trigrams(prompt)) / len(mine | trigrams(prompt)))
        shared = len(mine & trigrams(nearest)) / len(mine | trigrams(nearest))
        assert shared < 0.5, f"{row['prompt']!r} is too near to {nearest!r}"
