"""What a command line asks about: its options, and what its words stand for.

Nothing here imports torch, so that a mistake in the words is shown at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import read_file
from spbench.bench.measure import PACKAGE, names
from spbench.bench.setting_values import CONFIG, names_a_file, remote_name
from spbench.bench.tools.jobs.job_files import path_and_part
from spbench.bench.tools.jobs.python_values import makes_configurations
from spbench.bench.yaml_files import SUFFIXES, packaged, read_yaml
from spbench.impls import SUFFIX as PYTHON
from spbench.impls import published_model, published_models

#: a mapping with this key is a scenario
_OF_SCENARIOS = "groups"
#: fields of a Hugging Face config.json, of which other JSON files of jobs have none
_OF_CONFIGS = ("model_type", "architectures")


@dataclass(frozen=True)
class Asked:
    """What the command line says of the cells.

    Attributes:
        settings: new values of the cells' settings, by dotted name.
        micro_batch: samples of a micro-batch; how many there are follows.
        where, variant: as of :class:`Narrowing`, for scenarios alone.
        given: what the files of a job leave to run time, by name.
    """

    cluster: str | None = None
    gpus: int | None = None
    strategy: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    where: Sequence[tuple[str, str]] = ()
    variant: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)


def kind_of(words: Sequence[str]) -> Literal["scenario", "model", "job"]:
    """What words stand for.

    Raises:
        UserError: nothing.
    """
    (first, *others) = words
    if not others and _is_scenario(first):
        return "scenario"
    if not others and _is_model(first) and not makes_configurations(first):
        return "model"
    if missing := [word for word in words if not path_and_part(word)[0].is_file()]:
        published = (each.name for each in published_models())
        known_names = [*packaged(PACKAGE), *names("model"), *published]
        hint = suggestion(missing[0], known_names, "spbench list scenarios, spbench list models")
        hint = remote_name(missing[0]) or ("" if Path(missing[0]).suffix or others else hint)
        raise UserError(f"{shown(missing[0])} is no scenario, model or file{hint}")
    return "job"


def _is_scenario(word: str) -> bool:
    if word in packaged(PACKAGE):
        return True
    path = Path(word).expanduser()
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    try:
        return _OF_SCENARIOS in read_yaml(path)
    except UserError:  # perhaps a job's file, whose reader will say what is wrong
        return False


def _is_model(word: str) -> bool:
    if word in names("model") or PYTHON in word:
        return True
    path = Path(word).expanduser()
    if (path / CONFIG).is_file():
        return True
    if not names_a_file(word) or not path.is_file():
        return not path.exists() and published_model(word) is not None
    text = read_file(path).decode(errors="replace")
    return path.suffix == ".json" and any(f'"{name}"' in text for name in _OF_CONFIGS)


def ask_for(needed: Mapping[str, Any], model: str) -> None:
    """Ask for all that is missing of a model at once.

    Args:
        needed: values by flag, such as ``--seq-len N``; None: missing.

    Raises:
        UserError: something is missing.
    """
    if missing := [flag for flag, value in needed.items() if value is None]:
        flags = ", ".join(missing[:-1]) + " and " * (len(missing) > 1) + missing[-1]
        hint = "; spbench list clusters has the names" if "--cluster NAME" in missing else ""
        raise UserError(f"{model} is a model: give {flags} too{hint}")
