"""The error that every part of bench raises where the user can mend the cause, and text for messages."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence

from spbench.impls import raised

#: the most characters of an input that a message repeats
MOST_SHOWN = 200


class Interrupted(Exception):
    """A person has interrupted a run; the text says which results are kept, and how to continue."""


class UserError(Exception):
    """An error that the user can mend: what, where and how, in one line; commands exit with code 2."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """A message in one line; words of more than MOST_SHOWN characters, which come from inputs, are cut."""
    return " ".join(map(shortened, text.split()))


def shown(value: object) -> str:
    """An input as text for messages: a string in quotes, any other value as Python writes it, without its
    middle if longer than MOST_SHOWN. Of a nested value only the shown entries are read."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST_SHOWN else repr(shortened(value))
    return shortened(_REPR.repr(value))


def described(error: BaseException) -> str:
    """The type and the text of an error in one line, even if its ``__str__`` raises."""
    return one_line(raised(error))


def shortened(text: str) -> str:
    """The text; if longer than MOST_SHOWN, its beginning, its end and its number of characters."""
    if len(text) <= MOST_SHOWN:
        return text
    begin, end = text[: MOST_SHOWN * 3 // 5], text[-MOST_SHOWN // 4 :]
    return f"{begin}...{end}({len(text)} characters)"


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first ``most`` names, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


#: shows as many entries and levels of a value as a message has room for; reprlib's own bounds are smaller
_REPR = reprlib.Repr()
_REPR.maxlevel = 6
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MOST_SHOWN


def suggestion(word: object, known: Iterable[str], where: str = "") -> str:
    """The end of an error about an unknown name: ``; did you mean 'x'? (choices: x, y)``.

    Without a name close to ``word`` the question is left out; without known names the text is empty. If the
    list of names is long, only the nearest names are listed.

    Args:
        where: the command that shows all names, such as "spbench list models".
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


def refuse_unknown(what: str, name: str, known: Iterable[str]) -> None:
    """Raise a UserError, ``what`` with the name and a :func:`suggestion`, if a name is not a known one."""
    if name not in (names := [*known]):
        raise UserError(f"{what} {shown(name)}{suggestion(name, names)}")


#: the most characters of the list of names in a message
_MOST_KNOWN = 400
