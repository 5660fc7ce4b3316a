"""What the files of torchtitan hold: its TOML, and its configurations in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.files import read_file
from spbench.bench.tools.jobs.job_files import JobFile, mapping_in, path_and_part
from spbench.bench.tools.jobs.torchtitan_python import CONFIGURATION, of_python

#: of which a TOML file of torchtitan has some
_SECTIONS = {"model", "training", "parallelism", "activation_checkpoint", "experimental"}


def content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of a file; None where it is no TOML with some of them and no Python that makes a
    configuration. UserError if it is damaged, or has something else than plain values."""
    if file.path.suffix == ".py":
        return of_python(file)
    content = mapping_in(file) if file.path.suffix == ".toml" else None
    if content is None:
        return None
    sections = {name for name, section in content.items() if isinstance(section, dict)}
    return content if len(_SECTIONS & sections) >= 2 else None


def has_configurations(word: str) -> bool:
    """Whether a word is FILE.py or FILE.py:NAME of a file that makes configurations, and so no model."""
    path, _ = path_and_part(word)
    return path.suffix == ".py" and path.is_file() and CONFIGURATION.encode() in read_file(path)
