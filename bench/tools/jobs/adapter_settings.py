"""The model that a job's name of it means, and its settings for the job's adapters of low rank (LoRA).

A name means a file, a model on Hugging Face, or a model whose name differs only in words that change no size.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from spbench import impls
from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.rules import Said
from spbench.impls import near_model, published_model

#: fields of a config.json that say how many experts a layer has
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: fields of a config.json that show linear attention, whose adapters are not modelled
LINEAR_ATTENTION = ("linear_num_key_heads", "mamba_num_heads")
#: the words by which programs name all linear layers of a model
_EVERY = ("all", "all-linear")
_OF_MLP = (*impls.OPENING, impls.MLP_CLOSING)
#: prefixes of the paths of a layer's modules, in models of text and in models of text and images
_LAYERS = ("model.layers.0.", "model.language_model.layers.0.", "language_model.model.layers.0.")
_EXPERTS = re.compile(r"experts\b(?!.*shared)")


class Adapted(NamedTuple):
    """The modules that a job adapts or trains whole, and whether the adapters are DoRA's.

    Attributes:
        targets: modules with an adapter: a list of names, or a pattern of whole paths; None: all linear ones.
        whole: the names of modules whose own weights are trained, without an adapter.
        by_direction: whether adapters are DoRA's, which also learn magnitudes (arXiv 2402.09353).
    """

    targets: Said = Said(None)
    whole: Said = Said(())
    by_direction: Said = Said(False)


def set_adapters(
    account: Account,
    lora: Said,
    fields: Mapping[str, Any],
    adapted: Adapted,
    *,
    separate: bool = True,
    experts: str = "frozen",
) -> None:
    """Set the rank of a job's adapters, the linear layers with an adapter (linear attention has none, and is
    frozen), and the layers that are trained whole.

    Args:
        lora: the rank of the adapters; 0: the job has no adapters.
        fields: the fields of the model's config.json.
        separate: whether queries, keys and values, and an MLP's inputs, are layers with an adapter each.
        experts: "frozen": routed experts have no adapter, because they are no linear layers in
            transformers 5; "each": every expert has one; "shared": a rank's experts share one, not modelled.
    """
    others = [name for each in (adapted.targets, adapted.whole, adapted.by_direction) for name in each.names]
    if not lora.value:
        account.ignore("all weights are trained", *lora.names)
        account.ignore("of adapters, which the job has not", *others)
        return
    if type(lora.value) is not int or lora.value < 0:
        account.problems.append(f"{' and '.join(map(account.spelled, lora.names))}: no rank of adapters")
        return
    named = [_are_names(account, each) for each in (adapted.targets, adapted.whole)]
    if not all(named):
        return
    model = _model(fields)
    fields = {**fields, **fields.get("text_config", {})}
    routed = any(map(fields.get, EXPERTS))
    account.set("model_options.lora_rank", lora.value, *lora.names)
    there = model.adapted if isinstance(model, impls.AdapterOptions) else impls.PROJECTIONS
    own = ["experts"] * (routed and experts == "each")
    words = [*_targets(account, adapted.targets, there, separate), *own]
    if not words:
        account.refuse("adapters of none of the projections that have some here", *adapted.targets.names)
    elif words != [impls.ALL]:
        note = "each routed expert has adapters" if "experts" in words else ""
        account.set("model_options.lora_targets", words, *adapted.targets.names, note=note)
    account.took("adapters of all linear layers", *adapted.targets.names)
    if separate and not any(each.path == "model_options.separate_projections" for each in account.settings):
        note = "each linear layer has adapters of its own"
        account.set("model_options.separate_projections", True, note=note)
    shared, linear = routed and experts == "shared", any(map(fields.get, LINEAR_ATTENTION))
    if lacking := ["experts that share one"] * shared + ["linear attention"] * linear:
        because = "they are frozen here; 16 r (F + H) bytes of each matrix that is adapted are missing"
        missing = f"adapters (LoRA) of {' and '.join(lacking)}"
        account.stand_in(missing, "time and memory", because, *lora.names)
    _whole(account, adapted.whole, tied=bool(getattr(model, "tied", False)))
    if adapted.by_direction.value:
        because = (
            "without a magnitude of each row, and without the whole matrix W + B A that each use makes for "
            "its norms, of 4 F H bytes for a while"
        )
        account.stand_in("DoRA", "time and memory", because, *adapted.by_direction.names)
    account.ignore("adapters have no magnitudes", *adapted.by_direction.names)


def _model(fields: Mapping[str, Any]) -> impls.Model | None:
    """The model of a config.json; None if spbench does not model it, which the scenario's reader reports."""
    try:
        return impls.model_from_config(fields)
    except ValueError:
        return None


def _are_names(account: Account, modules: Said) -> bool:
    """Whether the value of ``modules`` is a name, a list of names or null; if not, the job has a problem."""
    if isinstance(modules.value, str | Sequence | None):
        return True
    given = " and ".join(map(account.spelled, modules.names))
    account.problems.append(f"{given}: {modules.value!r} is no name of modules and no list of these")
    return False


def _names(value: str | Sequence[Any] | None) -> list[str]:
    """The names of modules as a list, from a job's value: one name, a list of names, or null."""
    return [value] if isinstance(value, str) else [str(name) for name in value or ()]


def _targets(account: Account, targets: Said, adapted: Sequence[str], separate: bool) -> list[str]:
    """The words of lora_targets for a job's ``targets`` among the layers that spbench can adapt; other
    targets are noted in the account as not modelled."""
    asked = targets.value
    if asked is None or asked in _EVERY:
        return [impls.ALL]
    each = _names(asked)
    words = set[str]()
    beyond = list[str]()
    for name in each:
        named = {impls.ALL} if name in _EVERY else {*_named(name, whole=isinstance(asked, str))}
        words |= named
        beyond += [name] * (not named and not _EXPERTS.search(name))
    if beyond:
        because = "they have none here; 16 r (F + H) bytes of each matrix that is adapted are missing"
        account.stand_in(f"adapters (LoRA) of {', '.join(beyond)}", "memory", because, *targets.names)
    there = [name for name in adapted if name != "experts"]
    chosen = [name for name in there if name in words]
    if not separate:  # projections that are one matmul have one adapter
        chosen = [
            n
            for n in there
            if any(n in group and {*group} & words for group in (impls.QKV, impls.OPENING, [n]))
        ]
    return [impls.ALL] if impls.ALL in words or chosen == there else chosen


def _named(name: str, *, whole: bool) -> Iterator[str]:
    """The projections that match a name of modules, or a pattern of ``whole`` paths."""
    yield from table_content("transformers")["modules"].get(name.rpartition(".")[2].lstrip("*"), ())
    for word in (*impls.PROJECTIONS, *impls.LATENT):
        places = ("mlp.", "mlp.shared_experts.", "mlp.shared_expert.") if word in _OF_MLP else ("self_attn.",)
        for path in (f"{layer}{place}{word}" for layer in _LAYERS for place in places):
            if fnmatchcase(path, name) or path.endswith(f".{name}") or (whole and _fits(name, path)):
                yield word


def _fits(pattern: str, path: str) -> bool:
    """Whether a regular expression matches a whole path; no if the expression is wrong."""
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:
        return False


def _whole(account: Account, whole: Said, *, tied: bool) -> None:
    """Set which layers are trained whole; ``tied``: whether the head's weights are the embedding's."""
    names = [name.rpartition(".")[2] for name in _names(whole.value)]
    vocabularies = table_content("transformers")["vocabularies"]
    words = [word for word in ("embedding", "head") if word in map(vocabularies.get, names)]
    if words:
        account.set(
            "model_options.lora_whole", words, *whole.names, note="and the frozen ones that it began with"
        )
    if words and tied:
        account.set("model_options.tied", False, *whole.names, note="a copy of it is trained")
        because = "the frozen weights of the vocabulary are counted once more, 2 V H bytes too much"
        account.stand_in("a tied embedding of which a copy is trained", "memory", because, *whole.names)
    if beyond := [name for name in names if name not in vocabularies]:
        because = "it is frozen here, without its gradients and moments"
        account.stand_in(f"training {', '.join(beyond)} whole", "time and memory", because, *whole.names)
    account.ignore("nothing is trained whole", *whole.names)


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
