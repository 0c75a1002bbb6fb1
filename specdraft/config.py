"""Recipes: YAML layers and `key=value` overrides become one strict pydantic model, or an error that says where and why.

A recipe class stands beside the code that reads it and documents each setting in the string below it; this module
only reads, merges, checks and lists. Later layers win over earlier ones, overrides over files, mappings are merged
and lists replaced. Paths in a recipe are relative to the directory in which the command runs.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

KeyPath = tuple[str | int, ...]
R = TypeVar("R", bound="Recipe")


class SpecdraftError(Exception):
    """An error meant for people: what was wrong, what was found, what is allowed, what to do."""


class RecipeError(SpecdraftError):
    """A recipe that cannot be read: wrong use, found before any work begins."""


class Recipe(BaseModel):
    """Base of every recipe and section: unknown settings are errors, instances do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, protected_namespaces=()
    )

    def to_yaml(self) -> str:
        """The resolved recipe, defaults included; `load_recipe` reads it back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class Setting(NamedTuple):
    """One setting of a recipe, as help and error messages name it."""

    name: str  # dotted path from the top of the recipe
    kind: str  # its type, for people
    default: str | None  # as YAML; None: must be given
    help: str


def load_recipe(kind: type[R], paths: Sequence[Path], overrides: Sequence[str] = ()) -> R:
    """Merge the YAML files `paths` and the `dotted.key=value` overrides, in that order, into a `kind`.

    Values are YAML and strict: "4" is not 4. Raises RecipeError, one line a fault: file and line, key path, what was
    found, what is allowed, and the nearest known name for one that is not known.
    """
    origins: dict[KeyPath, str] = {}
    layers = [_read(path, origins) for path in paths]
    layers += [_override(text, origins) for text in overrides]
    try:
        merged = OmegaConf.merge(*layers) if layers else OmegaConf.create({})
        data: dict[str, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise RecipeError(f"{_names(paths)}: the layers cannot be merged: {error}") from error
    try:
        return kind.model_validate_json(json.dumps(_with_defaults(kind, data), default=str), strict=True)
    except ValidationError as error:
        faults = [_explain(kind, data, origins, _names(paths), fault) for fault in error.errors()]
        raise RecipeError("\n".join(faults)) from error


def settings(kind: type[BaseModel], prefix: str = "", given: BaseModel | None = None) -> Iterator[Setting]:
    """Every setting of a recipe, sections opened, in the order in which they are written down.

    `given` is the instance that stands as a section's default: its values are the defaults that hold.
    """
    for name, field in kind.model_fields.items():
        required = field.is_required() and given is None
        value = (
            None
            if required
            else getattr(given, name)
            if given is not None
            else field.get_default(call_default_factory=True, validated_data={})
        )
        models = _models(field.annotation)
        listed = bool(models) and get_origin(field.annotation) in (list, tuple, dict)
        if not models or listed or (value is None and not required):
            text = " ".join((field.description or "").split())
            yield Setting(f"{prefix}{name}", _type_name(field.annotation), None if required else _plain(value), text)
        for model in models:
            inside = f"{prefix}{name}{'[]' if listed else ''}."
            yield from settings(model, inside, value if isinstance(value, model) else None)


def _with_defaults(kind: type[Recipe], data: dict[str, Any]) -> dict[str, Any]:
    """Let a section that is given in part keep the rest of its default, as `settings` promises."""
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in kind.model_fields.items()
        if name in data and not field.is_required()
    }
    return {name: _completed(value, defaults.get(name)) for name, value in data.items()}


def _completed(value: object, default: object) -> object:
    if not isinstance(value, dict) or not isinstance(default, BaseModel):
        return value
    if value.get("kind", getattr(default, "kind", None)) != getattr(default, "kind", None):
        return value
    rest = default.model_dump(mode="json", exclude=set(value))
    return {name: _completed(part, getattr(default, name, None)) for name, part in value.items()} | rest


def _read(path: Path, origins: dict[KeyPath, str]) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error}); --config wants a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        layer = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(layer, DictConfig):
        raise RecipeError(f"{path}: holds a list, where a mapping of settings is wanted")
    if node is not None:
        _locate(node, (), str(path), origins)
    return layer


def _locate(node: yaml.Node, key: KeyPath, path: str, origins: dict[KeyPath, str]) -> None:
    """Remember at which line each key path was written; a later layer's line replaces an earlier one's."""
    origins[key] = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _locate(value, (*key, name.value), path, origins)
            origins[(*key, name.value)] = f"{path}:{name.start_mark.line + 1}"
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _locate(value, (*key, index), path, origins)


def _override(text: str, origins: dict[KeyPath, str]) -> DictConfig:
    name, equals, _ = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name):
        raise RecipeError(f"override {text!r}: wanted section.setting=value, for example training.learning_rate=3e-4")
    try:
        layer = OmegaConf.from_dotlist([text])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"override {text!r}: the value is not valid YAML: {error}") from error
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        origins[tuple(parts[:end])] = f"override {text!r}"
    return layer


def _explain(
    kind: type[Recipe], data: object, origins: dict[KeyPath, str], files: str, fault: Mapping[str, Any]
) -> str:
    key, owners = _resolve(kind, data, fault["loc"])
    where = next((origins[key[:end]] for end in range(len(key), 0, -1) if key[:end] in origins), files)
    name = ".".join(map(str, key)) or "the recipe"
    if fault["type"] == "extra_forbidden":
        return f"{where}: {name} is not a setting; {_nearest(kind, key, owners)}"
    if fault["type"] == "missing":
        return f"{where}: {name} is missing and has no default; give it in the file or as {name}=..."
    context, value, message = fault.get("ctx", {}), fault["input"], fault["msg"]
    allowed = str(context.get("expected") or context.get("expected_tags") or "")
    if fault["type"].startswith("union_tag"):
        name, value = f"{name}.{context['discriminator'].strip(chr(39))}", context.get("tag")
        message = f"Input should be one of {allowed}" if allowed else "must be given"
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    near = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", allowed), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    found = json.dumps(value, ensure_ascii=False, default=str)
    return f"{where}: {name}: {message}, found {found if len(found) <= 120 else found[:117] + '...'}{hint}"


def _resolve(kind: type[Recipe], data: object, loc: KeyPath) -> tuple[KeyPath, list[type[BaseModel]]]:
    """Drop what pydantic adds to a location for unions; also give the sections that may own the last name."""
    key: list[str | int] = []
    owners: list[type[BaseModel]] = [kind]
    for place, part in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(data, dict) and (part in data or last):
            key.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            key.append(part)
            data = data[part]
        else:
            continue
        if last:
            break
        if isinstance(part, str):
            fields = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
            owners = [model for field in fields for model in _models(field.annotation)]
            chosen = data.get("kind") if isinstance(data, dict) else None
            owners = [m for m in owners if chosen in _literals(m, "kind")] or owners
    return tuple(key), owners


def _nearest(kind: type[Recipe], key: KeyPath, owners: Sequence[type[BaseModel]]) -> str:
    name, section = str(key[-1]), "".join(f"{part}." for part in key[:-1])
    siblings = list(dict.fromkeys(field for owner in owners for field in owner.model_fields))
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {section}{near[0]}?"
    everywhere = {setting.name.rpartition(".")[2]: setting.name for setting in reversed([*settings(kind)])}
    if near := difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8):
        return f"did you mean {everywhere[near[0]]}?"
    return f"allowed here: {', '.join(siblings) or 'nothing'}"


def _models(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation such as `A | B | None` or `Annotated[A, ...]` may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Literal:
        return []
    return list(dict.fromkeys(model for part in get_args(annotation) for model in _models(part)))


def _literals(model: type[BaseModel], name: str) -> tuple[object, ...]:
    return get_args(model.model_fields[name].annotation) if name in model.model_fields else ()


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(_plain, arguments))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type_name, arguments)))
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(_plain(member.value) for member in annotation)
    if origin in (list, tuple, dict):
        inner = ", ".join(_type_name(part) for part in arguments if part is not Ellipsis)
        return f"{'mapping' if origin is dict else 'list'}[{inner}]"
    if origin is not None and arguments:  # Annotated
        return _type_name(arguments[0])
    return {"str": "text", "Path": "path"}.get(annotation.__name__, annotation.__name__)


def _plain(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(json.loads(json.dumps(value, default=_jsonable)), default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _jsonable(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths)) or "the recipe"
