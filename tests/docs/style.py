"""Rules for the prose of the pages, and how to list what breaks them.

    python -m tests.docs.style README.md     # each fault of the page, with its line
    python -m tests.docs.style               # faults and words by page
    python -m tests.docs.style --tighten     # lower the counts of style.yaml to what the pages have

Code, tables and the addresses of links are not prose; only the choice of words is checked in tables too.
`--help` of every command is held to the same rules, literal texts in code to the choice of words.
style.yaml limits the faults and the words of a page.
`sentencex` (MIT) splits sentences, `markdown-it-py` (MIT) reads the pages.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sentencex import segment

from tests.grid import data

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("style.yaml")
TOP = ("README.md", "REPRODUCE.md", "CONTRIBUTING.md", "CHANGELOG.md")

SENTENCE_WORDS = 35
PARAGRAPH_WORDS = 120
OPENING_WORDS = 80
#: words of the suite's own, as patterns, and what to write instead
WORDS = data(__file__)["WORDS"]
#: idioms that a reader reads twice, by what to write instead
IDIOMS = {
    r"(?:stands? |set |put |ours? )?beside": "next to, compared with, in addition to",
    r"alone": "only, by itself",
    r"anew": "again",
    r"at hand": "available",
    r"stands? for": "is, replaces",
}
_IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.IGNORECASE)
#: numbers of a sentence: no part of a name such as H100 or ZeRO-3
_NUMBER = re.compile(r"(?<![\w.,/-])±?[-+]?\d[\d,.]*(?![\w-])")
NUMBERS = 2
#: a mark of a command that takes long; what a reader sees of it is the paragraph before
_LONG = re.compile(r"<!-- (?:slow|not run): ((?:a|half an?|\w+) (?:minutes?|hours?)|twenty seconds)\b.*? -->")
_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
#: a sentence that begins with Of, also within a parenthesis
_OF = re.compile(r"(?:^|[.?!:][\"')]*\s+|\()\(?(Of)\s")
#: a sentence whose actor is a pronoun without its noun, and a comparison that does not say with what
_LOOSE = {
    "pronoun": r"(?:It|They|Its|Their|(?:This|These|Both) (?:is|are|has|have|can|must|costs?|means?))\b",
    "than what": r"(?!.*\bthan\b).*(?:\d%|\btimes|third|fifth) (?:slow|fast|small|larg|long|short|cheap)er\b",
}
#: how a page begins that a script writes
MADE = "<!-- scripts/"
_NO_WORDS = re.compile(r"^```.*?^```|<!--.*?-->", re.DOTALL | re.MULTILINE)
#: stands for the n-th piece of code of a text, and counts as one word
_CODE = re.compile(r"Code(\d+)x")


@dataclass(frozen=True)
class Fault:
    """A place in a page that breaks a rule; ``kind`` is the rule's name in style.yaml."""

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph, heading, table cell or item of a list, with its first line; its code is kept apart."""

    line: int
    place: str
    text: str
    code: tuple[str, ...]

    def fault(self, kind: str, position: int, why: str = "") -> Fault:
        """A fault at a position, quoted with what stands around it."""
        line = self.line + self.text.count("\n", 0, position)
        around = self.text[max(0, position - 40) : position + 60]
        return Fault(line, kind, f"{why}... {self.printed(around)} ...")

    def printed(self, part: str) -> str:
        """A part of the text on one line, with its code put back."""
        return " ".join(_CODE.sub(lambda code: f"`{self.code[int(code[1])]}`", part).split())


def words(text: str) -> int:
    """Number of words: what stands between spaces and has a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def _text(token: Token, place: str) -> Text:
    code: list[str] = []
    parts: list[str] = []
    for child in token.children or ():
        if child.type == "code_inline":
            parts.append(f"Code{len(code)}x")
            code.append(child.content)
        elif child.type == "text":
            parts.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            parts.append("\n")
    line = (token.map or [0])[0] + 1
    return Text(line, place, "".join(parts), tuple(code))


def texts(markdown: str) -> Iterator[Text]:
    """The texts of a page in order. Blocks of code, and tables as a whole, are empty texts."""
    place, tables = "", 0
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type in ("fence", "code_block", "table_open"):
            yield Text((token.map or [0])[0] + 1, "block", "", ())
        tables += {"table_open": 1, "table_close": -1}.get(token.type, 0)
        if token.type in ("heading_open", "paragraph_open"):
            place = token.tag if token.type == "heading_open" else "paragraph"
        # a line that begins with colons is an instruction to MkDocs
        if token.type == "inline" and not token.content.startswith(":"):
            yield _text(token, "cell" if tables else place)


def nested(text: str) -> Iterator[int]:
    """Positions of the parentheses that open within another one."""
    depth = 0
    for position, character in enumerate(text):
        if character == "(" and depth:
            yield position
        depth = max(0, depth + {"(": 1, ")": -1}.get(character, 0))


def _opening(page: list[Text]) -> Iterator[Fault]:
    """A page answers its title in prose, before anything else stands there."""
    if not page or page[0].place != "h1":
        yield Fault(1, "opening", "the page does not begin with its title")
        return
    count = 0
    for text in page[1:]:
        if text.place != "paragraph":
            break
        count += words(text.text)
    if not 0 < count <= OPENING_WORDS:
        yield Fault(
            page[0].line, "opening", f"{count} words of prose after the title, not 1 to {OPENING_WORDS}"
        )


def faults(markdown: str, opening: bool) -> Iterator[Fault]:
    """The faults of a page; the rule about its opening only if ``opening``."""
    page = list(texts(markdown))
    for mark in _LONG.finditer(markdown):
        before = markdown[: mark.start()]
        if not re.search(rf"\*The .+ takes? about {re.escape(mark[1])}:\*", before[-100:]):
            yield Fault(
                before.count("\n") + 1, "hidden time", f"write *The command below takes about {mark[1]}:*"
            )
    if opening:
        yield from _opening(page)
    for text in page:
        for position, why in word_faults(text.text):
            yield text.fault("word", position, f"{why}: ")
        if text.place == "paragraph":
            yield from _paragraph_faults(text)


def _paragraph_faults(text: Text) -> Iterator[Fault]:
    if (count := words(text.text)) > PARAGRAPH_WORDS:
        yield text.fault("long paragraph", 0, f"{count} words: ")
    for position in nested(text.text):
        yield text.fault("nested parenthesis", position)
    for match in _IDIOM.finditer(text.text):
        yield text.fault("idiom", match.start())
    for match in _OF.finditer(text.text):
        yield text.fault("begins with Of", match.start(1))
    line = text.line
    for sentence in segment("en", text.text):
        if (count := words(sentence)) > SENTENCE_WORDS:
            yield Fault(line, "long sentence", f"{count} words: {text.printed(sentence)}")
        if (count := len(_NUMBER.findall(sentence))) > NUMBERS:
            yield Fault(line, "numbers", f"{count} numbers: {text.printed(sentence)}")
        for kind, pattern in _LOOSE.items():
            if re.match(pattern, " ".join(sentence.split())):
                yield Fault(line, kind, text.printed(sentence))
        line += sentence.count("\n")


def word_faults(text: str) -> Iterator[tuple[int, str]]:
    """Positions of words that are the suite's own, each with what to write instead."""
    for match in _WORD.finditer(text):
        better = next(b for word, b in WORDS.items() if re.fullmatch(word, match[0], re.IGNORECASE))
        yield match.start(), f"'{match[0]}' ({better})"


def printed_texts(source: str) -> Iterator[tuple[int, str]]:
    """The literal texts of several words in a module's code, with their lines; docstrings are left out."""
    tree = ast.parse(source)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, holders) and node.body]
    documented = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
        if isinstance(value, str) and " " in value.strip():
            yield node.lineno, value


def pages() -> dict[str, Path]:
    """The pages that the rules hold, by their paths in the repository."""
    paths = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
    by_hand = (path for path in paths if not path.read_text().startswith(MADE))
    return {path.relative_to(ROOT).as_posix(): path for path in by_hand}


def page_faults(name: str) -> list[Fault]:
    return list(faults(pages()[name].read_text(), opening=name.startswith("docs/")))


def counts(listed: Iterable[Fault]) -> dict[str, int]:
    """Number of faults by kind."""
    return dict(sorted(Counter(fault.kind for fault in listed).items()))


def page_words(name: str) -> int:
    """Number of words outside code and comments of a page, or of a folder's pages (``name`` ends in /)."""
    texts = (_NO_WORDS.sub("", path.read_text()) for page, path in pages().items() if page.startswith(name))
    return sum(len(text.split()) for text in texts)


def _tighten() -> None:
    """Lower the counts of style.yaml to what the pages have; no count rises."""
    text = ALLOWED.read_text()
    head = text[: text.index("\nfaults:") + 1]
    lines = ["faults:"]
    for name, allowed in (yaml.safe_load(text)["faults"] or {}).items():
        now = counts(page_faults(name)) if name in pages() else {}
        lower = {kind: min(count, now.get(kind, 0)) for kind, count in allowed.items()}
        if any(lower.values()):
            lines += [f"  {name}:", *(f"    {kind}: {count}" for kind, count in lower.items() if count)]
    ALLOWED.write_text(head + "\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    if arguments == ["--tighten"]:
        _tighten()
        return
    for name in arguments:
        name = Path(name).resolve().relative_to(ROOT).as_posix()
        for fault in sorted(page_faults(name), key=lambda fault: fault.line):
            print(f"{name}:{fault.line}: {fault.kind}: {fault.text}")
    for name in [] if arguments else pages():
        shown = ", ".join(f"{count} {kind}" for kind, count in counts(page_faults(name)).items())
        print(f"{name}: {page_words(name)} words; {shown or 'no fault'}")


if __name__ == "__main__":
    main(sys.argv[1:])
