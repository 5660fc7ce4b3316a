"""Cases that are written in YAML: groups, each of rows, each row the product of its fields' alternatives; and
tables of a test's parameters, by its name."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml


def _often(case: dict[str, Any], default: Any) -> bool:
    return all(case[name] in some for name, some in default.items()) if isinstance(default, dict) else default


def cases(path: Path) -> list[Any]:
    """A parameter for each case of the groups of a file, by its group and the alternatives that it has.

    A group has fields and, in ``rows``, rows of further ones; a field that is a list has alternatives.
    ``default`` is whether a row is in the default run, or by field the alternatives that are in it.
    """
    parameters = []
    for name, group in yaml.safe_load(path.read_text()).items():
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


def tabled(file: str, test: str) -> pytest.MarkDecorator:
    """The parameters of a test: the names and rows of its table in the YAML file beside its module."""
    table = yaml.safe_load(Path(file).with_suffix(".yaml").read_text())[test]
    return pytest.mark.parametrize(table["names"], table["rows"])
