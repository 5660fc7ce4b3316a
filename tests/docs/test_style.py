"""The prose of the pages keeps to the rules of style.py, but for the faults that style.yaml counts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.docs.style import ALLOWED, counts, faults, page_faults, page_words, pages

CONFIGURED: dict[str, Any] = yaml.safe_load(ALLOWED.read_text())


@pytest.mark.parametrize("name", pages())
def test_a_page_has_as_many_faults_as_are_allowed(name: str) -> None:
    """With more, mend the page; with fewer, `python -m tests.docs.style --tighten` lowers what is allowed."""
    page = page_faults(name)
    listed = "\n".join(f"{name}:{fault.line}: {fault.kind}: {fault.text}" for fault in page)
    assert counts(page) == (CONFIGURED["faults"] or {}).get(name, {}), listed


def test_faults_are_allowed_for_pages_alone() -> None:
    assert set(CONFIGURED["faults"] or {}) <= set(pages())


@pytest.mark.parametrize("name", CONFIGURED["words"])
def test_pages_have_no_more_words_than_their_budget(name: str) -> None:
    assert 0 < page_words(name) <= CONFIGURED["words"][name]


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
    "a heading": ("## What was sent to it\n\nFine.", [(7, "word")]),
    "a table": (f"| what is\n| --- |\n| {LONG} {LONG} |\n| made (a (b)) |", [(10, "word")]),
    "code and links": (f"```sh\nmade {LONG} (a (b))\n```\n\n[A](made/of_it.md 'told') <!-- made -->", []),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_faults_are_seen(case: str) -> None:
    markdown, planted = PLANTED[case]
    assert [(fault.line, fault.kind) for fault in faults(OPENING + markdown, opening=True)] == planted


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
    assert [each.kind for each in faults(markdown, opening=True)] == (["opening"] if fault else [])
    assert list(faults(markdown, opening=False)) == []
