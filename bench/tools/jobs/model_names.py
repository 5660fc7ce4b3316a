"""The models that jobs name: a path, a name on Hugging Face, or a name that differs from a known one in words
that change no size."""

from __future__ import annotations

from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.impls import near_model, published_model

#: the remark on the part of a model of text and images that is left out
_TOWER = "text alone is counted; a tower for images{} is left out, with what a job holds for its weights"


class NamedModel(NamedTuple):
    """The model for which a job's name of a model stands.

    Attributes:
        model: the name in a scenario.
        fields: of its config.json that count.
        taken: how it stands for the job's name, if the names differ; "": they do not.
        beside: what stands beside the text and is left out; "": nothing does.
    """

    model: str
    fields: dict[str, Any]
    taken: str = ""
    beside: str = ""

    def account(self, account: Account, *names: str) -> None:
        """Say of the arguments that name it that another name stands for theirs."""
        if self.taken:
            account.stand_in("sizes of this model", "memory and time", self.taken, *names)
        if self.beside:
            account.stand_in("samples of images and text", "memory and time", self.beside, *names)
        if left_out := table_content("transformers")["left_out"].get(self.fields.get("model_type", "")):
            account.stand_in(left_out["missing"], left_out["may_move"], left_out["because"], *names)


def named_model(name: str) -> NamedModel:
    """The model that a job names.

    Raises:
        UserError: there is no such file and no such name, or a part of the model is not modelled.
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
