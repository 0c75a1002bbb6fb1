"""The report as a file and as a page: it comes back as it was, says what its figures mean, and loads nothing."""

import html
import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
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
    assert len(drawings) == 10
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


def test_e01_every_parting_is_listed_with_its_gap_and_what_rounding_does_there(text: str) -> None:
    listed = re.search(r"<tr><td>3</td><td>17</td>.*?</tr>", text)
    assert listed is not None
    assert re.findall(r"<td>([^<]*)</td>", listed[0]) == ["3", "17", "104", "99", "0.0131", "0.0131", "0.0620"]
    assert "A gap within the rounding is a tie" in text


def test_e28_e29_every_word_of_the_table_opens_to_say_what_it_means(text: str) -> None:
    """tau with its free token, alpha as conditional and not the acceptance ratio: in place, without a pointer."""
    report = example_report()
    terms = re.findall(r'<details class="term"><summary>([^<]*)</summary><p>([^<]*)</p>', text)
    said = {html.unescape(name): html.unescape(meaning) for name, meaning in terms}
    for figure in page.figures(report):
        assert said[figure.name] == report.definitions[figure.definition]
    assert "free token included" in said["tau"]
    assert "Not alpha" in said["acceptance ratio"]


def test_page_can_be_read_without_a_mouse_and_without_colour(text: str) -> None:
    parsed = _Page(text)
    anchors = {value[1:] for name, value in parsed.attributes if name == "href"}
    identifiers = {value for name, value in parsed.attributes if name == "id"}
    assert anchors
    assert anchors <= identifiers
    assert text.count('<div class="scroll"') == text.count('<div class="scroll" tabindex="0" role="region" aria-label=')
    assert all('role="img" aria-label="' in drawing for drawing in re.findall(r"<svg[^>]*>", text))
    styles = {kind: re.search(rf"\.{kind} {{([^}}]*)}}", text) for kind in ("accepted", "corrected", "free", "first")}
    marks = {kind: re.sub(r"background:[^;]*;", "", found[1]).strip() for kind, found in styles.items() if found}
    assert len(set(marks.values())) == 4, "each kind of token differs by more than its colour"
    levels = [int(tag[1]) for tag in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), "no heading skips a level"


def test_answers_stand_side_by_side_and_one_opens_at_a_time() -> None:
    report = example_report()
    twice = [report.samples[0], report.samples[0].model_copy(update={"system": "tree of 16"}), report.samples[1]]
    text = page.html(report.model_copy(update={"samples": twice}))
    assert text.count('<details name="answers"') == 2
    assert text.count('<details name="answers" open') == 1
    assert text.count('<p class="answer">') == 3


def test_speed_by_batch_size_stands_in_every_form(text: str) -> None:
    report = example_report()
    rows = page.batch_rows(report)
    assert [row[:3] for row in rows[:3]] == [
        ("chain of 4", "1", "40"),
        ("chain of 4", "4", "10"),
        ("chain of 4", "16", "2"),
    ]
    written = page.markdown(report)
    for row in rows:
        assert "".join(f"<td>{cell}</td>" for cell in row) in text
        assert f"| {' | '.join(row)} |" in written
    assert [figure.of(report.systems[0]) for figure in page.figures(report) if figure.name == "stops paying"] == [
        "about 5.4"
    ]


def test_an_older_report_that_defines_less_still_has_a_page() -> None:
    report = example_report()
    known = {name: text for name, text in report.definitions.items() if name not in ("i.i.d. tau", "round cost")}
    older = report.model_copy(update={"definitions": known})
    names = [figure.name for figure in page.figures(older)]
    assert "tau" in names
    assert "i.i.d. tau" not in names
    assert "<h2" in page.html(older)
