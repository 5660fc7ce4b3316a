"""The error that every part of the harness raises for what a user can mend."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable

from spbench.impls import raised

#: characters of an input that a message repeats
MOST_SHOWN = 200


class Interrupted(Exception):
    """A person ended what runs; the text says what is kept, and how it goes on."""


class UserError(Exception):
    """Something that the user can mend: what, where and how. Printed as one line, with exit code 2."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """A message in one line, in which no word is longer than MOST_SHOWN: such a word is an input."""
    return " ".join(map(shortened, text.split()))


def shown(value: object) -> str:
    """An input as messages repeat it: a text in quotes, other values as Python writes them. The middle of
    what is longer than MOST_SHOWN is left out. Reads no more of a nested value than it shows."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST_SHOWN else repr(shortened(value))
    return shortened(_REPR.repr(value))


def described(error: BaseException) -> str:
    """The type and the text of an error, whatever its own ``__str__`` does, in one line."""
    return one_line(raised(error))


def shortened(text: str) -> str:
    """A text, or its beginning and its end with how long it is."""
    if len(text) <= MOST_SHOWN:
        return text
    begin, end = text[: MOST_SHOWN * 3 // 5], text[-MOST_SHOWN // 4 :]
    return f"{begin}...{end}({len(text)} characters)"


#: shows no more entries and levels of a value than a message has room for; reprlib's own bounds are shorter
_REPR = reprlib.Repr()
_REPR.maxlevel = 6
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MOST_SHOWN


def suggestion(word: object, known: Iterable[str], where: str = "") -> str:
    """The end of an error about an unknown name: ``; did you mean 'x'? (choices: x, y)``.

    Without a name close to ``word`` the question is left out; without known names the text is empty. Where
    there are very many names, the nearest are shown.

    Args:
        where: what shows all of them, as "spbench list models".
    """
    names, word = [str(name) for name in known], str(word)[:MOST_SHOWN]
    tail = word.casefold().rpartition("/")[2]
    close = [name for name in names if tail == name.casefold().rpartition("/")[2]]  # of an owner
    close = close or [name for name in names if word in re.split("[-_+]", name)]  # h100 is dgx-h100, not h800
    close = close or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    guess = f"; did you mean {min(close, key=len)!r}?" if close else ""
    if not names:
        return guess
    text = ", ".join(names)
    if len(text) <= _MOST_KNOWN:
        return f"{guess} (choices: {text})"
    nearest = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    few = f"nearest of {len(names)}: {', '.join(nearest)}" if nearest else f"none of {len(names)} is like it"
    return f"{guess} ({few}{f'; all: {where}' if where else ''})"


#: characters of the names that a message lists
_MOST_KNOWN = 400
