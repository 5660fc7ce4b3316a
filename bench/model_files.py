"""Models of the user's own: the config.json files of Hugging Face that cells name by their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.user_files import parse_json, read_file

SUFFIX = ".json"
#: what a folder of a model has its configuration in
CONFIG = "config.json"
#: of files that are no folders of models
_OF_FILES = (SUFFIX, ".py", ".yaml", ".yml", ".toml", ".sh")


def names_a_file(model: str) -> bool:
    """Whether what a cell calls its model is the path of a file, or of a folder with one, and no name."""
    return "/" in model or model.endswith(SUFFIX)


def remote_name(model: str) -> str:
    """What to do about a name of a model on Hugging Face, for the end of a message; "" for other texts."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) or Path(model).suffix in _OF_FILES:
        return ""
    return "; if that is its name on Hugging Face, download its config.json and give the path of that"


def read_model_file(model: str, folder: Path = Path()) -> dict[str, Any]:
    """The fields that count of a config.json, as :func:`counting_fields`. UserError if it cannot be read, is
    no JSON object, or has something that no model here has.

    Args:
        model: path of the file or of the folder that it lies in.
        folder: what a relative path starts from.
    """
    path = folder / Path(model).expanduser()
    path = path / CONFIG if path.is_dir() else path
    try:
        content = parse_json(path, read_file(path))
    except UserError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        raise UserError(f"{error}{remote_name(model) if missing else ''}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold an object with the fields of a model's configuration")
    from spbench.impls.models.huggingface.config import counting_fields  # imports torch, as few cells need

    try:
        return counting_fields(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
