"""The model that a name in a job means: a file, a model on Hugging Face, or a model whose name differs from
the job's only in words that change no size."""

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
    """The model that a job names, and how it differs from the model that spbench counts.

    Attributes:
        model: the model's name in a scenario.
        fields: the fields of the model's config.json that matter for its sizes.
        taken: why another model replaces the job's, in words; "": it is the same model.
        beside: a remark on the part for images that is left out; "": the model has no such part.
    """

    model: str
    fields: dict[str, Any]
    taken: str = ""
    beside: str = ""

    def account(self, account: Account, *names: str) -> None:
        """Note in ``account`` that arguments ``names``, which name the model, are modelled only closely."""
        if self.taken:
            account.stand_in("sizes of this model", "memory and time", self.taken, *names)
        if self.beside:
            account.stand_in("samples of images and text", "memory and time", self.beside, *names)
        if left_out := table_content("transformers")["left_out"].get(self.fields.get("model_type", "")):
            account.stand_in(left_out["missing"], left_out["may_move"], left_out["because"], *names)


def named_model(name: str) -> NamedModel:
    """The model that a job calls ``name``. UserError if there is no file and no model of that name, or a part
    of the model is not modelled."""
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
