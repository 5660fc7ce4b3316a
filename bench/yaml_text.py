"""Words of others in a YAML file that is written line by line: none of them can end its line."""

from __future__ import annotations

from typing import Any

import yaml

_LONGEST_COMMENT = 200


class _OneLine(yaml.SafeDumper):
    """Writes a text with line breaks or control characters in double quotes, these escaped."""

    def represent_text(self, text: str) -> yaml.Node:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _OneLine.represent_text)


def scalar(value: Any) -> str:
    """A value in one line of YAML; what reads it gets an equal one."""
    how: dict[str, Any] = {"default_flow_style": True, "width": float("inf"), "allow_unicode": True}
    text = yaml.dump(value, Dumper=_OneLine, sort_keys=False, **how)
    return text.removesuffix("\n").removesuffix("\n...")


def comment(text: str) -> str:
    """A text as a comment of one line: what cannot be printed is escaped, what is long is cut."""
    shown = text if len(text) <= _LONGEST_COMMENT else f"{text[: _LONGEST_COMMENT - 3]}..."
    return "# " + "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
    )
