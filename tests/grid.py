"""Parameters of tests from YAML files: groups of rows, in which each combination of a row's alternatives is a
case; tables of parameters, by the name of the test; and tables and texts, by the name of their constant."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml


def _often(case: dict[str, Any], default: Any) -> bool:
    return all(case[name] in some for name, some in default.items()) if isinstance(default, dict) else default


def cases(path: Path) -> list[Any]:
    """A pytest parameter for each case in a file; its id is the group's name and the case's alternatives.

    A group has fields and, in ``rows``, rows with further fields; a list of values is a field's alternatives.
    ``default`` says whether a row is in the default run, or has, by field, the alternatives that are.
    """
    parameters = []
    for name, group in yaml.load(path.read_text(), yaml.CSafeLoader).items():
        for row in group.pop("rows", [{}]):
            fields = {"default": True, **group, **row}
            default = fields.pop("default")
            chosen = [field for field, value in fields.items() if isinstance(value, list)]
            for values in product(*(fields[field] for field in chosen)):
                case = fields | dict(zip(chosen, values, strict=True))
                words = [
                    name,
                    *(str(case[field]) for field in {**row, **dict.fromkeys(chosen)} if field in case),
                ]
                marks = () if _often(case, default) else pytest.mark.slow
                parameters.append(pytest.param(case, id=" ".join(words), marks=marks))
    return parameters


@cache
def data(file: str | Path) -> dict[str, Any]:
    """The tables and texts of the test module ``file`` by name, from the YAML file beside the module."""
    content: dict[str, Any] = yaml.load(Path(file).with_suffix(".yaml").read_text(), yaml.CSafeLoader)
    return content


def tabled(file: str, test: str) -> pytest.MarkDecorator:
    """The mark with a test's parameters, from the test's table in the YAML file of its module ``file``."""
    table = data(file)[test]
    return pytest.mark.parametrize(table["names"], table["rows"])
