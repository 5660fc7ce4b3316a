"""The prose of the pages keeps to the rules of style.py, but for the faults that style.yaml counts.
Numbers in the prose of some pages of docs are those of committed files and of arithmetic."""

import csv
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from spbench.bench.command_line.cli import COMMANDS
from tests.docs import style

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
    "35 words": (f"It {LONG}.", []),
    "36 words after a line": (f"Fine.\nIt `really does` {LONG}.", [(8, "long sentence")]),
    "36 words in a list": (f"- Fine.\n- It is {LONG}.", [(8, "long sentence")]),
    "abbreviations": (f"It is, e.g. in 3.5 GiB of `a b. c`, {LONG}.", [(7, "long sentence")]),
    "two sentences": (f"> Half {LONG[:80]}. The rest {LONG[:80]}.", []),
    "120 words": (SIX * 20, []),
    "126 words": (SIX * 21, [(7, "long paragraph")]),
    "parentheses": (
        "It (so (here)\nand (here)) is. And (this) (is `f(x(y))`).",
        [(7, _IN), (8, _IN)],
    ),
    "of in a parenthesis": ("It is. (Of\nthese three.) Lots Of\nthem.", [(7, _OF)]),
    "of in a list": ("- Of these, one.\n- One of these. `Of` it. Offers. Of it.", [(7, _OF), (8, _OF)]),
    "words": ("The three products,\nand as TOLD. An inner product, not known.", [(7, "word"), (8, "word")]),
    "idioms": (
        "Set beside it, it alone\nstands for all. Besides, go.",
        [(7, "idiom"), (7, "idiom"), (8, "idiom")],
    ),
    "numbers": ("One H100 of 8, 3.5% and `4`. ZeRO-3 of 2, 3\nand 4.", [(7, "numbers")]),
    "a hidden time": ("<!-- slow: a minute -->\n```sh\nls\n```", [(7, "hidden time")]),
    "a time": ("*About a minute on two cores:*\n\n<!-- slow: a minute -->\n```sh\nls\n```", []),
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


def test_how_much_of_the_peak_the_longest_sequences_reach() -> None:
    found = {line["name"]: float(line["mfu"]) for line in reversed(rows("layouts.csv", RESULTS / "advice"))}
    for sentence, name in (
        (r"peak FLOPs\) of (\d+)%", "8b-8-1m"),
        (r"two replicas reaches (\d+)%", "8b-64-1m"),
    ):
        assert numbers("advice.md", sentence) == [round(100 * found[name])]


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
