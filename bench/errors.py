"""The error that every part of the harness raises for what a user can mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something that the user can mend: what, where and how. Printed as one line, with exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def suggestion(word: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: ``; did you mean 'x'? (known: x, y)``.

    Without a name close to ``word`` the question is left out; without known names the text is empty.
    """
    names = [str(name) for name in known]
    close = [name for name in names if str(word) in re.split("[-_+]", name)]  # h100 is dgx-h100, not h800
    close = close or difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    guess = f"; did you mean {min(close, key=len)!r}?" if close else ""
    return f"{guess} (known: {', '.join(names)})" if names else guess
