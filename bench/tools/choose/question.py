"""The question of `spbench advise`: one model, length and batch on a number of GPUs of a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from spbench.bench import measure
from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.setting_values import MOST_RANKS, VARIABLES
from spbench.bench.tools.choose.asked import Asked, OwnLayout, ask_for, changed_cluster, kind_of
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.subject import subject
from spbench.bench.tools.jobs.flags import program_flags
from spbench.impls import FOLDED_AXES, HEEDED, LIBRARIES, MESH_AXES, PLUS, Model, Unsupported, model_preset

#: tokens of a batch by default: Llama 3's first batches (arXiv 2407.21783, section 3.4.1)
BATCH_TOKENS = 4 * 2**20
#: by which share the default batch may change, so that numbers of GPUs that are no power of two divide it
_NEAR = 0.25
#: parts of a cell in which layouts differ, and the settings of ``training`` that all layouts have as given
_SEARCHED = ("strategy", "strategy_options", "sizes", "mesh", "training")
_OF_EVERY_LAYOUT = ("step", *VARIABLES)
#: parts of a cell that belong to its strategy
_BELONGS = {"strategy": ("strategy", "sizes", "mesh")}
#: names that ``--fixed`` accepts: these, and options of these sections
_FIXED, _WITH_OPTIONS = (*MESH_AXES, *FOLDED_AXES, "micro_batch"), ("training", "model_options")


@dataclass(frozen=True)
class Question:
    """The question of `spbench advise`, to which a search finds the fastest layouts.

    Attributes:
        cell: the model, its options, precision, batch, length and cluster; on one rank.
        gpus: how many GPUs the layouts have.
        only: strategies and backends to search; without any strategy (or backend) here, all are searched.
        without: strategies and backends that no layout may have, also nested in others.
        fixed: ranks along axes, and micro_batch, that all layouts must have.
        options: options of the model and of backends, by dotted name, that all layouts must have.
        remarks: lines of text on how the question was made.
        figures: changed figures of the cluster, in the words of ``--set``; "": none.
        program: layouts that this program has no arguments for are left out; "": no program.
        own: the layout that a job or a scenario already has, on as many GPUs; None: there is none.
    """

    cell: Cell
    gpus: int
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    figures: str = ""
    program: str = ""
    own: OwnLayout | None = None

    def check_axes(self, flag: str, ranks: Mapping[str, int]) -> None:
        """Raises a UserError for ranks of experts without experts, or micro-batches of an inference."""
        experts = getattr(self.model, "experts", 0)
        for name, n in ranks.items():
            if name in FOLDED_AXES and n > 1 and not experts:
                raise UserError(f"{flag} {name}={n}: the model has no experts, which ep and etp are for")
            if name == "micro_batch" and self.forward_only:
                raise UserError(f"{flag} {name}={n}: an inference has no micro-batches")

    def runs(self, cell: Cell, what: str = "") -> bool:
        """Whether the program has arguments for a cell, or for one part of the cell if ``what`` names it.

        Args:
            what: "strategy" (with its options, ranks and mesh), "training" or "model_options"; "": all of it.
        """
        if not self.program:
            return True
        if cell.key not in self._missing:
            self._missing[cell.key] = program_flags(self.program, cell).missing
        return not any(line.startswith(_BELONGS.get(what, what)) for line in self._missing[cell.key])

    @cached_property
    def _missing(self) -> dict[str, tuple[str, ...]]:
        """The settings for which the program has no arguments, by cell key; :meth:`runs` fills it."""
        return {}

    def on_replicas(
        self, dp: int = 2, batch: int = 2, training: Mapping[str, Any] = {}, **parts: Any
    ) -> Cell:
        """The question's cell on ``dp`` replicas, with other settings of ``training`` and other parts."""
        content = {**self.cell.training.model_dump(exclude_defaults=True), **training}
        update = {"sizes": Sizes(dp=dp), "batch": batch, "training": TrainingOptions.model_validate(content)}
        return self.cell.model_copy(update={**update, **parts})

    def with_figures(self, figures: Mapping[str, str]) -> Self:
        """The same question on a cluster with other figures, by dotted name.

        Raises:
            UserError: the cluster has no such figure, or a value is no number or factor.
        """
        if not figures:
            return self
        path = changed_cluster(self.cell.cluster, figures)
        cell = self.cell.model_copy(update={"cluster": path})
        return replace(self, cell=cell, figures=measure.written(figures))

    @property
    def forward_only(self) -> bool:
        """Whether the question is about an inference."""
        return self.cell.training.step == "inference"

    @property
    def cluster(self) -> str:
        """The name of the cluster, with the figures that were changed."""
        name = self.cell.cluster
        return measure.load_cluster(name).about if self.figures else name

    @property
    def asked(self) -> dict[str, Any]:
        """The question as plain data: model, cluster, GPUs, length, changed figures and batch."""
        return TABLES.record("asked", self)

    @cached_property
    def model(self) -> Model:
        """The question's model."""
        return model_preset(*self.cell.model_arguments)

    @cached_property
    def heeded(self) -> frozenset[str]:
        """The features of the model's attention besides a causal mask, such as a window: keys of HEEDED."""
        _, length = self.cell.shape
        sites = self.model.sites(1, length, 1)
        return frozenset(word for site in sites for word in HEEDED if word in site.dims)

    def allows(self, strategy: str) -> bool:
        """Whether ``only`` and ``without`` allow a strategy, also a nested one."""
        wanted = strategy in (self.strategies or [strategy])
        return wanted and not {*strategy.split(PLUS)} & {*self.without}

    def allows_backend(self, backend: str) -> bool:
        """Whether ``only`` and ``without`` allow a backend."""
        return backend in (self._only("backend") or [backend]) and backend not in self.without

    def keeps(self, settings: Mapping[str, Any]) -> bool:
        """Whether a layout may have these settings, by dotted name: none contradicts :attr:`options`."""
        return all(self.options.get(name, value) == value for name, value in settings.items())

    @property
    def strategies(self) -> list[str]:
        """The strategies to which ``only`` limits the answers; empty: all may be among the answers."""
        return self._only("strategy")

    def _only(self, kind: str) -> list[str]:
        names_of_kind = measure.names(kind)
        return [each for each in self.only if each.split(PLUS)[0] in names_of_kind]


def question(
    words: Sequence[str],
    asked: Asked,
    batch_tokens: int | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    fixed: Sequence[tuple[str, str]] = (),
    program: str = "",
) -> Question:
    """The question that a command line asks about a model, a job or a scenario.

    Raises:
        UserError: an option is missing or invalid, or excludes every layout.
    """
    for part in (part for name in (*only, *without) for part in name.split(PLUS)):
        measure.check_known("strategy", [part], [*measure.names("strategy"), *measure.names("backend")])
    for name in asked.settings:
        _check_setting(name)
    dotted = [pair for pair in fixed if "." in pair[0]]
    axes = whole_numbers("--fixed", [pair for pair in fixed if pair not in dotted], _FIXED)
    options = measure.option_values("--fixed", dotted)
    settings = {**asked.settings, **_of_model(options)}
    kind = kind_of(words)
    if kind == "model":
        length = settings.get("seq_len")
        ask_for({"--cluster NAME": asked.cluster, "--gpus N": asked.gpus, "--seq-len N": length}, words[0])
    # a job has a batch of its own
    remarks = [] if kind == "job" and not batch_tokens else _set_batch(settings, batch_tokens, asked.gpus)
    if asked.gpus is not None and asked.gpus > MOST_RANKS:
        raise UserError(f"--gpus {asked.gpus}: there can be {MOST_RANKS} at most")
    # reading a job's file may need the number of GPUs; a model's cell has one rank
    ranks = asked.gpus if kind == "job" else None
    about = subject(words, replace(asked, gpus=ranks, settings=settings))
    distinct = {(c.model, c.seq_len, c.batch, c.cluster, c.precision): c for c in about.cells}
    if len(distinct) > 1:
        raise UserError(
            f"{' '.join(words)} has {len(distinct)} questions; choose one model, length and batch, as by "
            "--seq-len and --batch"
        )
    (cell,) = distinct.values()
    gpus = asked.gpus or cell.sizes.world
    own = None
    if kind != "model" and len(about.cells) == 1 and cell.sizes.world == gpus:
        own = OwnLayout.of(cell, settings, about.job)
        cell, remarks = own.without_switches(), [*remarks, *own.remarks()]
    plain = _of_every_layout(cell)
    if kind == "model" and not program:
        plain = _with_stacked_experts(plain)
    if not measure.can_time(plain.model_copy(update={"sizes": Sizes(dp=gpus)})):
        raise UserError(
            f"cluster {cell.cluster} lacks figures that a step time of {gpus} {cell.precision} ranks needs: "
            f"see spbench list cluster {cell.cluster}, or take another precision, as --set precision=fp16"
        )
    # without remarks on settings that the search chooses
    remarks += [each for each in about.remarks if not each.startswith("not said")]
    asked_question = Question(plain, gpus, only, without, axes, options, remarks, "", program, own)
    _check(asked_question)
    return asked_question


def _check(asked: Question) -> None:
    """Raises a UserError if the model cannot have the length, no layout can have the given ranks, or the
    program has no arguments for what is trained, whatever the backend."""
    try:
        asked.model.sites(1, asked.cell.shape[1], 1)
    except Unsupported as error:
        raise UserError(f"{asked.cell.model} cannot be run: {error}") from error
    asked.check_axes("--fixed", asked.fixed)
    if not asked.program:
        return
    of_layouts = (*_BELONGS["strategy"], "training")
    lacking: list[str] = []
    for backend in measure.names("backend"):
        flags = program_flags(asked.program, asked.on_replicas(training={"backend": backend}))
        lines = [line for line in flags.missing if not line.startswith(of_layouts)]
        if not lines:
            return
        lacking = min([*filter(None, [lacking]), lines], key=len)
    raise UserError(f"--for {asked.program}: {flags.program} has no {'; no '.join(lacking)}")


def _of_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the model among ``--fixed``; raises a UserError for names in no known section."""
    for name in options:
        if name.partition(".")[0] not in _WITH_OPTIONS:
            raise UserError(
                f"--fixed {name}: give an option of {' or '.join(_WITH_OPTIONS)}, as "
                f"training.optimizer=device, or {', '.join(_FIXED)}"
            )
    return {name: value for name, value in options.items() if name.startswith("model_options.")}


def _set_batch(settings: dict[str, Any], batch_tokens: int | None, gpus: int | None) -> list[str]:
    """Set the batch from its tokens, or by default to a multiple of the odd factor of the GPUs' number, if
    one is near; returns remarks on a default.

    Raises:
        UserError: there are tokens for no whole sequence, or no length.
    """
    length = settings.get("seq_len")
    if batch_tokens is not None:
        if length is None:
            raise UserError("--batch-tokens needs --seq-len")
        if batch_tokens < length:
            raise UserError(
                f"--batch-tokens {batch_tokens}: less than one sequence of {length} tokens; give that or more"
            )
        settings["batch"] = batch_tokens // length
    elif "batch" not in settings and length is not None:
        batch = max(1, BATCH_TOKENS // length)
        odd = (gpus or 1) // ((gpus or 1) & -(gpus or 1))
        near = max(1, round(batch / odd)) * odd
        settings["batch"] = batch = near if abs(near - batch) <= _NEAR * batch else batch
        return [f"not said, so taken: batch {batch} ({batch * length} tokens); --batch-tokens"]
    return []


def _of_every_layout(cell: Cell) -> Cell:
    """The cell on one rank, without the settings in which layouts differ."""
    training = {name: getattr(cell.training, name) for name in _OF_EVERY_LAYOUT}
    return cell.model_copy(
        update={
            "strategy": "single",
            "strategy_options": {},
            "sizes": Sizes(),
            "mesh": None,
            "training": TrainingOptions.model_validate({k: v for k, v in training.items() if v is not None}),
            "variant": "",
        }
    )


def _with_stacked_experts(cell: Cell) -> Cell:
    """The cell with one stacked parameter for all experts of a rank, as in programs without
    TransformerEngine, unless the cell sets that option."""
    model = model_preset(*cell.model_arguments)
    if not getattr(model, "experts", 0) or "stacked_experts" in cell.model_options:
        return cell
    if (model.library, model.experts_matmul) != (LIBRARIES[0], "grouped"):  # type: ignore[attr-defined]
        return cell
    return cell.model_copy(update={"model_options": {**cell.model_options, "stacked_experts": True}})


def _check_setting(name: str) -> None:
    section, _, own = name.partition(".")
    if section in _SEARCHED and own not in _OF_EVERY_LAYOUT:
        raise UserError(
            f"--set {name}: advise looks for it; narrow that by --only, --without and --fixed (also "
            "--fixed training.optimizer=device), or ask spbench fit about one layout"
        )


def whole_numbers(
    flag: str, pairs: Sequence[tuple[str, str]], allowed: Sequence[str] = (*MESH_AXES, *FOLDED_AXES)
) -> dict[str, int]:
    """The numbers of an option's (name, text) pairs, by name.

    Raises:
        UserError: a name is not allowed or is given twice, or a text is no whole number from 1 on.
    """
    numbers: dict[str, int] = {}
    for name, text in measure.given_once(flag, pairs).items():
        if name not in allowed or not text.isdecimal() or int(text) < 1:
            raise UserError(f"{flag} {name}={text}: give {', '.join(allowed)} as a whole number from 1 on")
        numbers[name] = int(text)
    return numbers
