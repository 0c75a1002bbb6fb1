from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from toy_stage import Deep, Toy, Wide

from specdraft.config import RecipeError, load_recipe, settings

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error(*paths: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(Toy, paths, overrides or [])
    return str(caught.value)


def test_later_layers_win_and_overrides_win_over_files(write: Write) -> None:
    base = write("base.yaml", "training: {learning_rate: 1e-2, schedule: linear}\nterms: {kl: 1}\n")
    layer = write("layer.yaml", "training:\n  learning_rate: 2e-2\nterms: {tv: 0.5}\n")
    recipe = load_recipe(
        Toy, [base, layer], ["training.files=[a.jsonl, b.jsonl]", "drafter.kind=wide", "drafter.width=8"]
    )
    assert recipe.training.learning_rate == 2e-2
    assert recipe.training.schedule == "linear"
    assert recipe.training.files == (Path("a.jsonl"), Path("b.jsonl"))
    assert recipe.terms == {"kl": 1.0, "tv": 0.5}
    assert recipe.drafter == Wide(width=8)


def test_no_layers_give_the_defaults_and_values_interpolate(write: Write) -> None:
    assert load_recipe(Toy, []).drafter == Deep()
    assert load_recipe(Toy, [write("empty.yaml", "")]) == Toy()
    shared = write("shared.yaml", "training: {learning_rate: 0.5}\nterms: {kl: '${training.learning_rate}'}\n")
    assert load_recipe(Toy, [shared]).terms == {"kl": 0.5}


def test_a_resolved_recipe_reads_back_to_an_equal_one(write: Write) -> None:
    recipe = load_recipe(
        Toy, [], ["training.files=[ä.jsonl]", "training.learning_rate=3e-7", "drafter={kind: wide, width: 4}"]
    )
    assert load_recipe(Toy, [write("again.yaml", recipe.to_yaml())]) == recipe


def test_a_section_given_in_part_keeps_the_rest_of_its_default() -> None:
    recipe = load_recipe(Toy, [], ["training.schedule=linear", "drafter.layers=5"])
    assert recipe.training.learning_rate == 2e-3
    assert recipe.drafter == Deep(layers=5)


def test_an_unknown_setting_is_named_with_its_line_and_the_nearest_name(write: Write) -> None:
    path = write("a.yaml", "terms: {kl: 1}\ntraining:\n  learning_rat: 3\n")
    assert error(path) == f"{path}:3: training.learning_rat is not a setting; did you mean training.learning_rate?"


def test_a_setting_in_the_wrong_section_is_sent_to_the_right_one() -> None:
    assert error(overrides=["learning_rate=1"]) == (
        "override 'learning_rate=1': learning_rate is not a setting; did you mean training.learning_rate?"
    )


def test_a_name_like_no_other_gets_the_list_of_what_is_allowed() -> None:
    message = error(overrides=["drafter.kind=wide", "drafter.width=1", "drafter.zzz=1"])
    assert message == "override 'drafter.zzz=1': drafter.zzz is not a setting; allowed here: kind, width"


def test_a_setting_of_another_kind_of_drafter_is_an_error() -> None:
    assert "drafter.layers is not a setting" in error(overrides=["drafter={kind: wide, width: 1, layers: 2}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.schedule=cosin", "Input should be 'cosine' or 'linear', found \"cosin\"; did you mean 'cosine'?"),
        ("training.learning_rate=0", "training.learning_rate: Input should be greater than 0, found 0"),
        ("training.learning_rate='3'", 'training.learning_rate: Input should be a valid number, found "3"'),
        ("drafter.layers=true", "drafter.layers: Input should be a valid integer, found true"),
        ("drafter.layers=2.5", "drafter.layers: Input should be a valid integer"),
        (
            "drafter.kind=depe",
            "drafter.kind: Input should be one of 'wide', 'deep', found \"depe\"; did you mean 'deep'?",
        ),
        (
            "drafter.kind=wide",
            "drafter.width is missing and has no default; give it in the file or as drafter.width=...",
        ),
        ("training.files=[1]", "training.files.0: "),
        ("terms={}", "terms: at least one is wanted"),
    ],
)
def test_values_are_strict_and_the_message_says_what_is_allowed(override: str, message: str) -> None:
    assert message in error(overrides=[override])


def test_every_fault_is_reported_at_once_each_where_it_stands(write: Write) -> None:
    path = write("a.yaml", "drafter:\n  kind: wide\ntraining:\n  schedule: x\n")
    lines = error(path, overrides=["fail=perhaps"]).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:1", f"{path}:4", "override 'fail=perhaps'"]


def test_the_layer_that_wrote_the_value_last_is_blamed(write: Write) -> None:
    first, second = write("1.yaml", "fail: 1\n"), write("2.yaml", "\nfail: 2\n")
    assert error(first, second).startswith(f"{second}:2: fail: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "not valid YAML"),
        ("fail: true\nfail: false\n", "duplicate key"),
        ("- 1\n", "holds a list"),
        ("terms: ${nothing.here}\n", "nothing.here"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(write: Write, text: str, message: str) -> None:
    path = write("bad.yaml", text)
    assert message in error(path)
    assert str(path) in error(path)


def test_missing_file_and_malformed_override(tmp_path: Path) -> None:
    assert "nowhere.yaml: cannot be read" in error(tmp_path / "nowhere.yaml")
    for override in ("training.learning_rate", "=3", "a b=3", "training..x=1"):
        assert "wanted section.setting=value" in error(overrides=[override])


def test_settings_name_every_setting_with_its_type_default_and_docstring() -> None:
    found = {setting.name: setting for setting in settings(Toy)}
    assert list(found)[:4] == ["drafter.kind", "drafter.width", "drafter.layers", "training.learning_rate"]
    rate = found["training.learning_rate"]
    assert (rate.kind, rate.default, rate.help) == ("float", "0.002", "The peak rate.")
    assert found["check.learning_rate"].default == "0.001"
    assert (found["check"].kind, found["check"].default) == ("section | null", "null")
    assert found["drafter.width"].default is None
    assert found["training.schedule"].kind == "cosine | linear"
    assert found["training.files"].kind == "list[path]"
    assert found["terms"].default == "{kl: 1.0}"


def test_recipes_do_not_change_and_take_no_unknown_names() -> None:
    with pytest.raises(ValidationError):
        Toy().fail = True  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Deep(layer=3)  # type: ignore[call-arg]
