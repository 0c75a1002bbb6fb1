"""The report as a file and as a page: it comes back as it was, says what its figures mean, and loads nothing."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from evaluation.example_report import example_report
from rich.console import Console

from specdraft.config import SpecdraftError
from specdraft.evaluation import page
from specdraft.evaluation.report import Estimate, Losslessness, Report


@pytest.fixture(scope="module")
def text() -> str:
    return page.html(example_report())


def test_report_comes_back_as_it_was(tmp_path: Path) -> None:
    report = example_report()
    page.write(report, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.json", "report.md", "report.html"}
    assert Report.load(tmp_path / "new" / "report.json") == report
    assert json.loads((tmp_path / "new" / "report.json").read_text())["schema_version"] == 1


def test_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**json.loads(example_report().model_dump_json()), "schema_version": 2}))
    with pytest.raises(SpecdraftError, match="schema 1"):
        Report.load(path)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_page_loads_nothing(text: str) -> None:
    parsed = _Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    loading = ("src", "srcset", "href", "xlink:href", "data", "action", "poster")
    assert all(value.startswith("#") for name, value in parsed.attributes if name in loading)
    assert not any(name.startswith("on") for name, _ in parsed.attributes)
    outside = re.sub(r">[^<]*<", "><", text)  # attributes and markup without what is shown
    assert "http:" not in outside
    assert "https:" not in outside.replace("https://example.org", "")  # the example's own prompt, escaped
    assert not re.search(r"url\((?!#|&quot;#|'#)|@import", text)
    assert "default-src 'none'" in text


def test_page_escapes_what_prompts_say(text: str) -> None:
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;worn&gt;" in text


def test_pictures_take_their_colours_from_the_page(text: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) == 8
    for drawing in drawings:
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) == set(), "a fixed colour would not follow light and dark"
        assert "var(--ink)" in drawing
    assert "prefers-color-scheme: dark" in text
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_every_figure_has_its_definition_and_every_form_the_same_figures(text: str) -> None:
    report = example_report()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(page.table(report))
    forms = (text, page.markdown(report), console.export_text())
    for figure in page.figures(report):
        assert figure.definition in report.definitions
        for system in report.systems:
            assert all(figure.of(system) in form for form in forms), figure.name
    assert all(report.headline in form.replace("&#39;", "'") for form in forms[:2])


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (Estimate(value=1.5, low=1.4, high=1.6), "1.50 times as fast"),
        (Estimate(value=1.02, low=0.95, high=1.1), "not measurably faster or slower"),
        (Estimate(value=0.8, low=0.7, high=0.9), "slower than plain decoding: 0.80"),
        (None, "not compared"),
    ],
)
def test_headline_says_it_when_speculation_loses(speedup: Estimate | None, said: str) -> None:
    report = example_report()
    system = report.systems[0].model_copy(update={"speedup": speedup, "decode_speedup": speedup})
    assert said in report.model_copy(update={"systems": [system]}).headline


def test_one_system_that_fails_makes_the_headline_say_so() -> None:
    report = example_report()
    failed = Losslessness(verdict="failed", reason="3 of 40 answers differ", compared=40)
    bad = report.systems[0].model_copy(update={"losslessness": failed})
    assert "not lossless" in report.model_copy(update={"systems": [bad, report.systems[1]]}).headline


def test_report_without_plain_decoding_or_extras_still_has_a_page() -> None:
    report = example_report()
    bare = report.systems[0].model_copy(update={"speedup": None, "decode_speedup": None, "costs": None})
    short = report.model_copy(update={"systems": [bare], "plain": None, "samples": [], "training": [], "warnings": []})
    assert "speed-up" not in [figure.name for figure in page.figures(short)]
    assert "<svg" in page.html(short)
    assert page.markdown(short)
