"""The models that jobs name: a path, a name on Hugging Face, or a name that differs from a known one in words
that change no size."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.account import Account
from spbench.impls.models.huggingface.published import near_model, published_model


class NamedModel(NamedTuple):
    """What a job's name of a model stands for.

    Attributes:
        model: what a scenario calls it.
        fields: of its config.json that count.
        taken: how it stands for the name, if that is not its own; "": it is.
    """

    model: str
    fields: dict[str, Any]
    taken: str

    def account(self, k: Account, *names: str) -> None:
        """Say of the arguments that name it that another name stands for theirs."""
        if self.taken:
            k.stand_in("sizes of this model", "memory and time", self.taken, *names)


def named_model(name: str) -> NamedModel:
    """The model that a job names.

    Raises:
        UserError: there is no such file and no such name, or what it has is not modelled.
    """
    known = lexists(Path(name).expanduser()) or published_model(name)
    if not known and (near := near_model(name)):
        own = name.rstrip("/").rpartition("/")[2]
        return NamedModel(near.name, dict(near.config), f"{own} is taken to have the sizes of {near.name}")
    return NamedModel(name, read_model_file(name), "")
