"""The prose of the pages keeps to the rules of style.py, but for the faults that style.yaml counts. Numbers
in the prose of some pages of docs are those of committed files and of arithmetic. Relative links and images
of every Markdown page lead to a file, and to a heading or id in it. docs/learn: each chapter is whole, its
notebook has its cells, and its pictures say who holds what. Notebooks of the documentation print what their
committed outputs say, when they are run from the start.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import nbformat
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from spbench.bench.command_line.cli import COMMANDS
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from tests.docs import style
from tests.docs.blocks import PAGES, ROOT

CONFIGURED: dict[str, Any] = yaml.safe_load(style.ALLOWED.read_text())


@pytest.mark.parametrize("name", style.pages())
def test_a_page_has_as_many_faults_as_are_allowed(name: str) -> None:
    """With more, mend the page; with fewer, `python -m tests.docs.style --tighten` lowers what is allowed."""
    page = style.page_faults(name)
    listed = "\n".join(f"{name}:{fault.line}: {fault.kind}: {fault.text}" for fault in page)
    assert style.counts(page) == (CONFIGURED["faults"] or {}).get(name, {}), listed


def test_faults_are_allowed_for_pages_alone() -> None:
    assert set(CONFIGURED["faults"] or {}) <= set(style.pages())


@pytest.mark.parametrize("name", CONFIGURED["words"])
def test_pages_have_no_more_words_than_their_budget(name: str) -> None:
    assert 0 < style.page_words(name) <= CONFIGURED["words"][name]


@pytest.mark.parametrize("name", COMMANDS.names())
def test_help_keeps_to_the_rules(name: str) -> None:
    command = COMMANDS.load(name)
    helps = [each.help or "" for each in command.params if isinstance(each, click.Option)]
    for text in [command.help or "", *helps]:
        listed = [
            fault for fault in style.faults(text, opening=False) if fault.kind not in ("idiom", "numbers")
        ]
        assert [f"{fault.kind}: {fault.text}" for fault in listed] == []


#: literal texts that are no words for people, or have a word in another sense
NOT_PRINTED = {"matrix product", "links within a node", "left product", "right product"}


@pytest.mark.parametrize("folder", ["bench", "impls", "plots", "spbench"])
def test_printed_texts_choose_the_same_words(folder: str) -> None:
    wrong = [
        f"{path.relative_to(style.ROOT)}:{line}: {why}: {text}"
        for path in sorted((style.ROOT / folder).rglob("*.py"))
        for line, text in style.printed_texts(path.read_text())
        for _, why in style.word_faults(text)
        if text not in NOT_PRINTED
    ]
    assert wrong == []


def test_a_planted_word_in_code_is_seen() -> None:
    code = '"""Made."""\nKEY = "made"\ndef f(x):\n    """Found."""\n    print(f"{x} was found in", "it")\n'
    seen = [(line, why) for line, text in style.printed_texts(code) for _, why in style.word_faults(text)]
    assert seen == [(5, "'found' (a verb that says how: searched, fitted, detected)")]


_IN, _OF = "nested parenthesis", "begins with Of"
OPENING = "# A title\n\nThis answers it.\n\n## Next\n\n"
LONG = " ".join(["word"] * 34)
SIX = "Six words are in this one. "

#: pages with the lines and the kinds of their faults
PLANTED: dict[str, tuple[str, list[tuple[int, str]]]] = {
    "35 words": (f"One {LONG}.", []),
    "36 words after a line": (f"Fine.\nOne `really does` {LONG}.", [(8, "long sentence")]),
    "36 words in a list": (f"- Fine.\n- One is {LONG}.", [(8, "long sentence")]),
    "abbreviations": (f"One is, e.g. in 3.5 GiB of `a b. c`, {LONG}.", [(7, "long sentence")]),
    "two sentences": (f"> Half {LONG[:80]}. The rest {LONG[:80]}.", []),
    "120 words": (SIX * 20, []),
    "126 words": (SIX * 21, [(7, "long paragraph")]),
    "parentheses": (
        "One (so (here)\nand (here)) is. And (this) (is `f(x(y))`).",
        [(7, _IN), (8, _IN)],
    ),
    "of in a parenthesis": ("One is. (Of\nthese three.) Lots Of\nthem.", [(7, _OF)]),
    "of in a list": ("- Of these, one.\n- One of these. `Of` it. Offers. Of it.", [(7, _OF), (8, _OF)]),
    "words": ("The three products,\nand as TOLD. An inner product, not known.", [(7, "word"), (8, "word")]),
    "idioms": (
        "Set beside it, it alone\nstands for all. Besides, go.",
        [(7, "idiom"), (7, "idiom"), (8, "idiom")],
    ),
    "numbers": ("One H100 of 8, 3.5% and `4`. ZeRO-3 of 2, 3\nand 4.", [(7, "numbers")]),
    "a pronoun": ("They go. So it is.\nThis is it. This page is.", [(7, "pronoun"), (8, "pronoun")]),
    "a comparison": ("This is 3% slower.\nA is 3% slower than B.", [(7, "pronoun"), (7, "than what")]),
    "a hidden time": ("<!-- slow: a minute -->\n```sh\nls\n```", [(7, "hidden time")]),
    "a time": ("*The command below takes about a minute:*\n\n<!-- slow: a minute -->\n```sh\nls\n```", []),
    "a heading": ("## What was sent to it\n\nFine.", [(7, "word")]),
    "a table": (f"| what is\n| --- |\n| {LONG} {LONG} |\n| made (a (b)) |", [(10, "word")]),
    "code and links": (f"```sh\nmade {LONG} (a (b))\n```\n\n[A](made/of_it.md 'told') <!-- made -->", []),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_faults_are_seen(case: str) -> None:
    markdown, planted = PLANTED[case]
    assert [(fault.line, fault.kind) for fault in style.faults(OPENING + markdown, opening=True)] == planted


@pytest.mark.parametrize(
    ("markdown", "fault"),
    [
        (f"# A title\n\n{SIX * 13}\n\n## Next\n\nMore of it.", False),
        (f"# A title\n\n{SIX * 13}\n\n- More words are here.\n\n## Next", True),
        (f"# A title\n\nThe answer.\n\n```sh\nls\n```\n\n{SIX * 14}", False),
        ("# A title\n\n```sh\nls\n```\n\nThe answer.", True),
        ("# A title\n\n| a |\n| --- |\n| b |\n\nThe answer.", True),
        ("# A title\n\n## Another\n\nThe answer.", True),
        ("The answer.\n\n# A title", True),
    ],
    ids=["fits", "with a list", "before code", "code first", "table first", "heading first", "no title"],
)
def test_a_page_answers_its_title_first(markdown: str, fault: bool) -> None:
    assert [each.kind for each in style.faults(markdown, opening=True)] == (["opening"] if fault else [])
    assert list(style.faults(markdown, opening=False)) == []


RESULTS = style.ROOT / "results"
CHECK = RESULTS / "gpu" / "2026-11-26-nvidia-h200"


def numbers(page: str, sentence: str) -> list[float]:
    (found,) = re.finditer(sentence, (style.ROOT / "docs" / page).read_text())
    return [float(each.replace(",", "")) for each in found.groups()]


def rows(name: str, folder: Path = CHECK) -> list[dict[str, str]]:
    return [*csv.DictReader((folder / name).open(newline=""))]


def test_conclusions_from_layouts_on_64_gpus() -> None:
    lines = rows("same_work.csv", RESULTS / "four_d")[::-1]  # the first work of a model counts
    steps = {
        (line["work"].split()[0], line["layout, outermost axis first"]): line["step s"] for line in lines
    }
    rings = [
        "sp 8 x tp 8, Megatron-SP + Ring",
        "tp 8 x sp 8, Megatron-SP + Ring",
        "sp 64, Ring",
        "dp 8 x sp 8, Ring",
    ]
    best, worst, far, near = (float(steps["A", layout]) for layout in rings)
    replicas, rsa = (float(steps["BERT-Large", layout]) for layout in ("dp 64, single", "sp 64, RSA"))
    for sentence, expected in (
        (r"takes ([\d.]+) s with replicas only, and ([\d.]+) s with RSA", [replicas, rsa]),
        (r"([\d.]+) s with tensor parallelism within the node, and ([\d.]+) s", [best, worst]),
        (r"64 GPUs takes ([\d.]+) times as long", [far / near]),
    ):
        assert numbers("composition.md", sentence) == pytest.approx(expected, abs=0.05)


def test_what_one_h200_has_shown() -> None:
    verdicts = [row["status"] for row in rows("verify.csv")]
    counted = [verdicts.count("green"), verdicts.count("red")]
    assert numbers("gpu.md", r"(\d+) cases green, (\d+) red") == counted
    right = [row["ok"] for row in rows("linear_attention_nvidia-h200_errors.csv")]
    assert numbers("gpu.md", r"(\d+) results right") == [right.count("True")] == [len(right)]
    timed = [row for row in rows("linear_attention_nvidia-h200.csv") if int(row["length"]) >= 32 * 1024]
    for beside, sentence in (
        ("plain", r"(\d+) to (\d+) times faster"),
        ("roofline", r"(\d+) to (\d+) times the"),
    ):
        ratios = sorted(float(row[f"{beside}_ms"]) / float(row["triton_ms"]) for row in timed)
        ratios = [round(each if beside == "plain" else 1 / each) for each in ratios]
        assert numbers("gpu.md", sentence) == [min(ratios), max(ratios)]


LINKING = sorted([*PAGES, *(ROOT / "results").glob("[!r]*/*.md"), *ROOT.glob("results/reproduction/*.md")])
_ID = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")


@cache
def tokens(page: Path) -> list[Token]:
    """All tokens of a page, those within lines too."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [each for token in parsed for each in (token, *(token.children or ()))]


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        target = token.attrGet("href") if token.type == "link_open" else None
        target = token.attrGet("src") if token.type == "image" else target
        if target is not None:
            yield str(target)


@cache
def anchors(page: Path) -> set[str]:
    """Ids of a page: of its headings as GitHub and the site make them, and those of HTML."""
    found, seen = set[str](), Counter[str]()
    parsed = tokens(page)
    for position, token in enumerate(parsed):
        if token.type == "heading_open":
            children = parsed[position + 1].children or ()
            text = "".join(each.content for each in children if each.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        elif token.type in ("html_block", "html_inline"):
            found.update(_ID.findall(token.content))
    return found


def broken(page: Path) -> Iterator[str]:
    """The relative links of a page that lead nowhere."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    assert list(broken(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# A `b`: c, d\n\n# Twice\n\n# Twice\n\n<a id='mine'></a>\n")
    right = ["other.md", "#here", "other.md#a-b-c-d", "other.md#twice-1", "other.md#mine", "https://a.b/#c"]
    wrong = ["none.md", "#nowhere", "other.md#a-b-c", "other.md#twice-2", "none.png"]
    links = "\n".join(f"[a]({link})" for link in [*right, *wrong[:-1]])
    page.write_text(f"# Here\n\n{links}\n\n| a |\n|---|\n| ![a]({wrong[-1]}) |\n")
    assert list(broken(page)) == wrong


LEARN = ROOT / "docs" / "learn"
METHODS = ("tensor_parallelism", "ring_self_attention", "ring_attention", "ulysses", "lasp", "dsp", "experts")


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(LEARN)
    return import_module("pictures")


def test_the_notebook_has_the_cells_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LEARN)
    assert not import_module("notebook").differs()


@pytest.mark.parametrize("name", METHODS)
def test_a_chapter_has_both_pictures_its_bytes_and_a_fault(name: str, pictures: ModuleType) -> None:
    text, chapter = (LEARN / f"{name}.md").read_text(), pictures.CHAPTERS[name]
    drawn = [f"{each}_held" for each in chapter.held] + [f"{each}_timeline" for each in chapter.traced]
    tokens = [each for token in MarkdownIt().parse(text) for each in token.children or ()]
    shown = [str(token.attrGet("src")) for token in tokens if token.type == "image"]
    assert sorted(shown) == sorted(f"images/{each}.png" for each in drawn)
    for part in ("$ spbench trace ", "$ python bytes.py\n", "$ spbench verify ", "\nexit code 1\n"):
        assert part in text


@pytest.mark.parametrize(("placement", "pairs"), [("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])])
def test_panels_of_a_ring_count_the_pairs_under_the_mask(
    placement: str, pairs: list[int], pictures: ModuleType
) -> None:
    by_rank = LockstepRanks().run(
        {"sp": 4}, pictures._listed, partial(pictures.of_ring_attention, placement=placement)
    )
    counted = [[int(held.note.split()[0]) for held in rank if held.note[0].isdigit()] for rank in by_rank]
    assert [sum(each) for each in counted] == pairs


def test_panels_of_ulysses_have_a_head_of_all_positions_during_attention(pictures: ModuleType) -> None:
    by_rank = LockstepRanks().run({"sp": 4}, pictures._listed, pictures.of_ulysses)
    for rank, (before, during, after) in enumerate(by_rank):
        held = [[place for place in row if place] for row in during.text]
        assert held == [[*"01234567"] if head == rank else [] for head in range(4)]
        assert before.text == after.text


def test_panels_of_experts_count_the_rows_that_each_rank_gets(pictures: ModuleType) -> None:
    by_rank = LockstepRanks().run({"sp": 4}, pictures._listed, pictures.of_experts)
    assert [after.note for _, after, _ in by_rank] == ["1 row", "4 rows", "5 rows", "6 rows"]
    for rank, (chosen, after, back) in enumerate(by_rank):
        assert sum(cell != "" for row in chosen.text for cell in row) == 4
        assert [number for number, row in enumerate(after.text) if any(row)] == [rank]
        assert [*filter(None, back.text[0])] == [str(2 * rank), str(2 * rank + 1)]


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def texts(notebook: NotebookNode) -> Iterator[str]:
    """What the cells of a notebook print or show as text; of figures, only that there is one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.text if output.output_type == "stream" else output.data["text/plain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", ())}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert len(list(texts(notebook))) > 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    committed = list(texts(notebook))
    runner = client.NotebookClient(
        notebook,
        timeout=1500,
        kernel_name="python3",
        coalesce_streams=True,  # a command's output comes in pieces
        resources={"metadata": {"path": str(tmp_path)}},
    )
    runner.execute()
    assert list(texts(notebook)) == committed
