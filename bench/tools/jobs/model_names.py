"""The models that jobs name: a path, a name on Hugging Face, or a name that differs from a known one in words
that change no size."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.account import Account
from spbench.impls import near_model, published_model

#: what is left out of a model of text and images
_TOWER = "text alone is counted; a tower for images{} is left out, with what a job holds for its weights"
#: what the layers of a family have that those here have not: what is missing, what it moves, and why
_LEFT_OUT = {
    "seed_oss": (
        "dropout, 0.1 in this model as published",
        "memory and time",
        "none is counted, of attention or of what is added to hidden states, with masks of 1 byte an element",
    ),
    "phi": (
        "dropout of 0.1 and a bias of the head in this model",
        "memory and time",
        "neither is counted; a mask of dropout has 1 byte an element",
    ),
    "gemma2": (
        "a cap on attention's scores in this model",
        "time and memory",
        "none is counted: within a flash kernel it needs no memory, and eager attention keeps capped scores",
    ),
}


class NamedModel(NamedTuple):
    """What a job's name of a model stands for.

    Attributes:
        model: what a scenario calls it.
        fields: of its config.json that count.
        taken: how it stands for the name, if that is not its own; "": it is.
        beside: what stands beside the text and is left out; "": nothing does.
    """

    model: str
    fields: dict[str, Any]
    taken: str = ""
    beside: str = ""

    def account(self, k: Account, *names: str) -> None:
        """Say of the arguments that name it that another name stands for theirs."""
        if self.taken:
            k.stand_in("sizes of this model", "memory and time", self.taken, *names)
        if self.beside:
            k.stand_in("samples of images and text", "memory and time", self.beside, *names)
        if left_out := _LEFT_OUT.get(self.fields.get("model_type", "")):
            k.stand_in(*left_out, *names)


def named_model(name: str) -> NamedModel:
    """The model that a job names.

    Raises:
        UserError: there is no such file and no such name, or what it has is not modelled.
    """
    if lexists(Path(name).expanduser()):
        fields = read_model_file(name)
        return NamedModel(name, fields, beside=_TOWER.format("") if "text_config" in fields else "")
    model = published_model(name) or near_model(name)
    if model is None:
        return NamedModel(name, read_model_file(name))
    own = name.rstrip("/").rpartition("/")[2]
    same = published_model(name) is not None
    return NamedModel(
        name if same else model.name,
        dict(model.config),
        "" if same else f"{own} is taken to have the sizes of {model.name}",
        _TOWER.format(f" of {model.tower / 1e9:.2f} billion parameters") if model.tower else "",
    )
