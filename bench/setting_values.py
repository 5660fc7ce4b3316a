"""Values of settings: how sizes may be written, their bounds, the variables of the environment, and the files
that cells name: the config.json of a model, and the lengths of documents.

What a cell keeps of a file of lengths are bins of these, so that its rows do not depend on where the file
lies.

The training programs whose steps cells stand for are here too, and where what is simulated stands in for
something else that they run. Such steps were measured to take longer, so intervals of their times are as wide
as that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import decoded, parse_json, read_file
from spbench.impls import LARGEST, lacking_for, published_model, published_models

#: the factor of a size's suffix, in either case: 128K is 128 * 1024
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(
    r"(?P<number>[-+]?([0-9]{1,18}(_[0-9]+)*(\.[0-9]{1,9})?|\.[0-9]{1,9}))(?P<suffix>[kKmMgG]?)"
)
#: a number with commas, as people write it; on the command line a comma stands between two values
_WITH_COMMAS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
#: the ways to write a size, for messages
WAYS = "as 131072, 131_072, 128K or 0.5M"
#: beyond these no cell is of use, and sums over it would overflow or take all memory
MOST_RANKS, MOST_POSITIONS, MOST_STEPS = 2**17, 2**36, 10**6
#: a limit of time beyond which waiting for it overflows: three years
MOST_SECONDS = 10**8


def size(text: str) -> int | None:
    """The whole number that a word such as 131072, 131_072, 128K or .5M stands for; None if it is none."""
    if not (match := _SIZE.fullmatch(text)):
        return None
    number = Fraction(match["number"].replace("_", "")) * _FACTORS[match["suffix"].upper()]
    return int(number) if number.denominator == 1 else None


def with_suffix(value: Any) -> Any:
    """The number that a text with a suffix, such as "128K", stands for in a file; any other value (also the
    text "128") as it is."""
    if not isinstance(value, str) or not value.endswith((*"kKmMgG",)):
        return value
    number = size(value)
    return value if number is None else number


def no_size(text: str) -> str:
    """What is wrong with a text where a size is needed."""
    if size(text) is not None:
        return f"{shown(text)} is a text; leave out its quotes"
    mend = f"write {text.replace(',', '')}" if _WITH_COMMAS.fullmatch(text) else f"write it {WAYS}"
    return f"{shown(text)} is not a whole number; {mend}"


def _sized(value: Any) -> Any:
    """As :func:`with_suffix`, but ValueError for a text that is no size, with the ways to write one."""
    number = with_suffix(value)
    if isinstance(number, str):
        raise ValueError(no_size(number))
    return number


#: samples of a batch, or positions of a sequence
Count = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_POSITIONS)]
Ranks = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_RANKS)]
#: parts of a step, or steps, which are gone through one after another
Repeats = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_STEPS)]
#: a limit of time
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


#: the environment variable that each option of training stands for
VARIABLES = {"cublas_workspace": "CUBLAS_WORKSPACE_CONFIG", "cuda_alloc_conf": "PYTORCH_CUDA_ALLOC_CONF"}
EXPANDABLE_SEGMENTS = "expandable_segments:True"
MAX_SPLIT_SIZE = r"max_split_size_mb:\d+"
#: which torch refuses, MiB: its large segment
LEAST_SPLIT_SIZE = 20


def checked(option: str, value: str | None) -> str | None:
    """A variable's value; None for torch's default, so that a cell has one key.

    Raises:
        ValueError: torch would not read it, or it is not modelled.
    """
    if value is None:
        return None
    if option == "cublas_workspace":
        if not re.fullmatch(r"(:\d+:\d+)+", value):
            raise ValueError(f'{value!r} is no CUBLAS_WORKSPACE_CONFIG: write pairs :KIB:COUNT, as ":4096:8"')
        return value
    if value == "expandable_segments:False":
        return None
    if value == EXPANDABLE_SEGMENTS:
        return value
    if not re.fullmatch(MAX_SPLIT_SIZE, value):
        raise ValueError(
            f"of PYTORCH_CUDA_ALLOC_CONF {EXPANDABLE_SEGMENTS} and max_split_size_mb:N are modelled, not "
            f"{value!r}; leave the rest out"
        )
    if max_split_size_mb(value) <= LEAST_SPLIT_SIZE:
        raise ValueError(f"torch has max_split_size_mb of more than {LEAST_SPLIT_SIZE}, not {value!r}")
    return value


def max_split_size_mb(value: str) -> int:
    """N of "max_split_size_mb:N"."""
    return int(value.rpartition(":")[2])


_JSON = ".json"
#: the file in a model's folder that has its configuration
CONFIG = "config.json"
#: the endings of names that are files, not folders of models
_OF_FILES = (_JSON, ".py", ".yaml", ".yml", ".toml", ".sh")


def names_a_file(model: str) -> bool:
    """Whether what a cell calls its model is the path of a file, or of a folder with one, or a name on
    Hugging Face, and no name of a preset."""
    return "/" in model or model.endswith(_JSON)


def remote_name(model: str) -> str:
    """The end of a message on a model's name on Hugging Face: what to do about it; "" for other texts."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) or Path(model).suffix in _OF_FILES:
        return ""
    near, *_ = suggestion(model, [each.name for each in published_models()]).split(" (")
    return f"{near}; if that is its name on Hugging Face, download its config.json and give the path of that"


def read_model_file(model: str, folder: Path = Path()) -> dict[str, Any]:
    """The fields that count of a config.json, as :func:`counting_fields`. UserError if it cannot be read, is
    no JSON object, or has something that no model here has.

    Args:
        model: path of the file or of the folder that it lies in; where there is none, the name of a model on
            Hugging Face whose sizes are known.
        folder: what a relative path starts from.
    """
    path = folder / Path(model).expanduser()
    if not lexists(path) and (known := published_model(model)):
        return dict(known.config)
    path = path / CONFIG if path.is_dir() else path
    try:
        content = parse_json(path, read_file(path))
    except UserError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        if missing and (lacking := lacking_for(model)):
            raise UserError(f"{model} has {lacking}: not modelled") from error
        raise UserError(f"{error}{remote_name(model) if missing else ''}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold an object with the fields of a model's configuration")
    # imports torch, which commands that have no cell do without
    from spbench.impls import counting_fields

    try:
        return counting_fields(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


_LENGTHS = (".csv", ".txt", ".npy")
#: bins of a file with more lengths than that; each has as many documents as the others
MOST_BINS = 256
DOCUMENTS = "documents"


def with_documents(content: Any, folder: Path = Path()) -> Any:
    """The settings of a cell with what lies in the file that its model's option ``documents`` names, if it
    does; UserError for a file that cannot be read or that holds something else than lengths.

    Args:
        folder: what a relative path starts from.
    """
    options: Any = content.get("model_options") if isinstance(content, Mapping) else None
    named = options.get(DOCUMENTS) if isinstance(options, Mapping) else None
    if not isinstance(named, str) or not ("/" in named or named.endswith(_LENGTHS)):
        return content
    return {
        **content,
        "model_options": {**options, DOCUMENTS: bins_of(lengths_in(folder / Path(named).expanduser()))},
    }


def bins_of(lengths: np.ndarray[Any, Any]) -> list[list[int]]:
    """[shortest, longest, how many documents] of each bin: one bin for each length, or MOST_BINS bins of
    equally many documents."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) <= MOST_BINS:
        return [[int(n), int(n), int(count)] for n, count in zip(values, counts, strict=True)]
    parts = np.array_split(np.sort(lengths), MOST_BINS)
    return [[int(part[0]), int(part[-1]), len(part)] for part in parts]


def lengths_in(path: Path) -> np.ndarray[Any, Any]:
    """The lengths that a file holds [documents], each at least 1."""
    if path.suffix not in _LENGTHS:
        raise UserError(f"{path}: lengths of documents lie in files {', '.join(_LENGTHS)}")
    content = read_file(path)
    lengths = _array(path) if path.suffix == ".npy" else np.array([*_lines(path, content)], dtype=np.int64)
    if not len(lengths):
        raise UserError(f"{path}: holds no lengths; write one a line")
    if (least := int(lengths.min())) < 1:
        number = int(lengths.argmin()) + 1
        raise UserError(f"{path}: document {number} has {least} positions, and a document has at least 1")
    return lengths


def _array(path: Path) -> np.ndarray[Any, Any]:
    """What a .npy file holds."""
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header is parsed as Python: tokenizer, syntax, memory, ...
        raise UserError(f"{path}: not an array as numpy.save writes it, without objects") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise UserError(f"{path}: holds {what}; lengths are one array of integers [documents]")
    return array.astype(np.int64)


def _lines(path: Path, content: bytes) -> Iterator[int]:
    """The lengths of a text, one a line; a word in the first line is the column's name."""
    first = True
    for number, line in enumerate(decoded(path, content).splitlines(), 1):
        if not (word := line.partition("#")[0].strip()):
            continue
        of_column, first = first and "," not in word, False
        try:
            length = float(word)  # numpy.savetxt writes 1.000000000000000000e+03
        except ValueError:
            if of_column:
                continue
        else:
            if length.is_integer() and abs(length) < LARGEST:
                yield int(length)
                continue
        raise UserError(f"{path}:{number}: {word[:40]!r} is no length; write one length, an integer, a line")


#: names of what trains: axolotl, LLaMA-Factory and TRL run transformers' Trainer, or DeepSpeed where they
#: have a configuration of it; Megatron-Bridge, Primus and ms-swift by Megatron run "megatron"
PROGRAMS = (
    *("automodel", "deepspeed", "llm_foundry", "megatron", "prime_rl", "torchtitan", "transformers"),
    *("veomni", "verl"),
)
#: the backends of torch's fully_shard, which DeepSpeed's stages 2 and 3 are simulated by
_SHARDED = ("zero2", "zero3")
#: the grade of what is priced so, whose share is the whole step
STAND_IN = "stand-in"


class StandIn(NamedTuple):
    """Work of programs, and what stands in for it.

    Attributes:
        by: what stands in; "": it is not known which part of the work takes longer than simulated.
        programs: that do the work; empty: every program that a cell names.
        backends: with which they do it; empty: with any.
        axis: only cells with several ranks along it; "nodes": cells of several nodes; "": any cell.
        network: only clusters whose file prices the network by it; "": any, if a program is named.
    """

    work: str
    by: str
    programs: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    axis: str = ""
    network: str = ""

    @property
    def price(self) -> dict[str, Any]:
        """An entry of :attr:`Measurement.priced_by` for this work."""
        return {"work": self.work, "by": self.by, "grade": STAND_IN, "share": 1.0}

    def __str__(self) -> str:
        """The class, in :attr:`Measurement.rates`, of times in which this work is priced by its stand-in."""
        return f"{self.work} priced as {self.by}" if self.by else f"{self.work}, measured slower"


#: of a cell with several the first is the class of its time
STAND_INS = (
    StandIn("EFA", "InfiniBand", axis="nodes", network="InfiniBand"),
    StandIn("DeepSpeed", "fully_shard", ("deepspeed",), _SHARDED),
    StandIn("expert parallelism", "", axis="ep"),
    StandIn("torchtitan's TP", "Megatron's", ("torchtitan",), axis="tp"),
    StandIn("torchtitan over nodes", "", ("torchtitan",), _SHARDED, "nodes"),
)


#: the classes of times with them
STOOD_IN = tuple(map(str, STAND_INS))


def stand_ins(program: str, backend: str, ranks: Mapping[str, int], network: str = "") -> Iterator[StandIn]:
    """What stands in for work of a program, in a cell with a backend of data parallelism.

    Args:
        program: "" has none: the step is that of this suite.
        ranks: along each axis, and ``nodes``.
        network: what the network is priced by instead of a rate of its own; "": nothing.
    """
    for each in STAND_INS:
        of_program = network == each.network if each.network else program in (each.programs or (program,))
        is_so = of_program and backend in (each.backends or (backend,)) and (program or each.network)
        if is_so and (not each.axis or ranks.get(each.axis, 1) > 1):
            yield each


def _checked(name: str) -> str:
    if name and name not in PROGRAMS:
        raise ValueError(f"unknown program {shown(name)}{suggestion(name, PROGRAMS)}; others have none")
    return name


#: the name of a program, or ""
Program = Annotated[str, AfterValidator(_checked)]
