"""Values of settings: how sizes may be written, their bounds, environment variables, and the files that cells
name: the config.json of a model, and the lengths of documents.

A cell keeps bins of the lengths in such a file, so that its rows do not depend on where the file lies.

Training programs are here too, and stand-ins: work that is simulated in place of other work that a program
runs. Steps with stand-ins were measured to take longer, so the intervals of their times are wider.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from os.path import abspath, lexists
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from spbench import impls
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import decoded, parse_json, read_file
from spbench.bench.yaml_files import read_yaml
from spbench.impls import LARGEST, lacking_for, published_model, published_models

#: the factor of a size's suffix, in either case: 128K is 128 * 1024
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(
    r"(?P<number>[-+]?([0-9]{1,18}(_[0-9]+)*(\.[0-9]{1,9})?|\.[0-9]{1,9}))(?P<suffix>[kKmMgG]?)"
)
#: a number with commas between thousands; on the command line, a comma separates two values
_WITH_COMMAS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
#: the ways to write a size, for messages
WAYS = "as 131072, 131_072, 128K or 0.5M"
#: the largest sizes of a cell; larger cells are of no use, and sums would overflow or take all memory
MOST_RANKS, MOST_POSITIONS, MOST_STEPS = 2**17, 2**36, 10**6
#: the longest limit of time in seconds (three years); waiting for longer overflows
MOST_SECONDS = 10**8


def size(text: str) -> int | None:
    """The whole number that a word such as 131072, 131_072, 128K or .5M means; None if it means none."""
    if not (match := _SIZE.fullmatch(text)):
        return None
    number = Fraction(match["number"].replace("_", "")) * _FACTORS[match["suffix"].upper()]
    return int(number) if number.denominator == 1 else None


def with_suffix(value: Any) -> Any:
    """The number that a text with a suffix, such as "128K", means in a file; any other value (also the text
    "128") unchanged."""
    if not isinstance(value, str) or not value.endswith((*"kKmMgG",)):
        return value
    number = size(value)
    return value if number is None else number


def no_size(text: str) -> str:
    """The message on a text that is no size where a size is needed."""
    if size(text) is not None:
        return f"{shown(text)} is a text; leave out its quotes"
    mend = f"write {text.replace(',', '')}" if _WITH_COMMAS.fullmatch(text) else f"write it {WAYS}"
    return f"{shown(text)} is not a whole number; {mend}"


def _sized(value: Any) -> Any:
    """As :func:`with_suffix`, but ValueError for a text that is no size."""
    number = with_suffix(value)
    if isinstance(number, str):
        raise ValueError(no_size(number))
    return number


#: a number of samples of a batch, or of positions of a sequence
Count = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_POSITIONS)]
Ranks = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_RANKS)]
#: a number of steps, or of parts of a step that are run one after another
Repeats = Annotated[int, BeforeValidator(_sized), Field(gt=0, le=MOST_STEPS)]
#: a limit of time, in seconds
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


#: the environment variable of each option of training that has the variable's value
VARIABLES = {"cublas_workspace": "CUBLAS_WORKSPACE_CONFIG", "cuda_alloc_conf": "PYTORCH_CUDA_ALLOC_CONF"}
EXPANDABLE_SEGMENTS = "expandable_segments:True"
MAX_SPLIT_SIZE = r"max_split_size_mb:\d+"
#: MiB of torch's large segment; torch refuses this and smaller values of max_split_size_mb
LEAST_SPLIT_SIZE = 20


def checked(option: str, value: str | None) -> str | None:
    """The checked value of an environment variable; None for torch's default, so that a cell has one key.

    Raises:
        ValueError: torch would not read the value, or it is not modelled.
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
    """The number N in "max_split_size_mb:N"."""
    return int(value.rpartition(":")[2])


_JSON = ".json"
#: the file in a model's folder that has its configuration
CONFIG = "config.json"
#: the endings of names that are files, not folders of models
_OF_FILES = (_JSON, ".py", ".yaml", ".yml", ".toml", ".sh")


def names_a_file(model: str) -> bool:
    """Whether the name of a cell's model is the path of a file or folder, or a name on Hugging Face, and not
    the name of a preset."""
    return "/" in model or model.endswith(_JSON)


#: the key under which the cell of a user's step has the step with the whole path of its file
STEP_FILE = "step"


def names_a_step(text: str) -> bool:
    """Whether a text names a training step of the user's own program, such as "step.py:train"."""
    return re.fullmatch(r".+\.py:\w+", text) is not None


def remote_name(model: str) -> str:
    """The end of a message on an unknown model's name on Hugging Face, which says what to do; "" for texts
    that cannot be such a name."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model) or Path(model).suffix in _OF_FILES:
        return ""
    near, *_ = suggestion(model, [each.name for each in published_models()]).split(" (")
    return f"{near}; if that is its name on Hugging Face, download its config.json and give the path of that"


def read_model_file(model: str, folder: Path = Path()) -> dict[str, Any]:
    """The fields of a config.json that define a model (:func:`counting_fields`); of a user's step, its place
    as STEP_FILE. UserError if the file cannot be read, is no JSON object, or has settings that no model here
    supports.

    Args:
        model: a step; or the path of the file or of its folder; if there is no such path, the name of a model
            on Hugging Face whose sizes are known.
        folder: the folder from which a relative path starts.
    """
    path = folder / Path(model).expanduser()
    if names_a_step(model):
        return {STEP_FILE: abspath(path)}
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
    try:
        return impls.counting_fields(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


_LENGTHS = (".csv", ".txt", ".npy")
#: the number of bins for a file with more different lengths; the bins have equally many documents
MOST_BINS = 256
DOCUMENTS = "documents"


def with_documents(content: Any, folder: Path = Path()) -> Any:
    """The settings of a cell; if its model's option ``documents`` names a file, with bins of the lengths in
    that file instead. UserError if the file cannot be read or has something else than lengths.

    Args:
        folder: the folder from which a relative path starts.
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
    """[shortest length, longest length, number of documents] of each bin: one bin for each length, or, for
    more lengths, MOST_BINS bins of equally many documents."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) <= MOST_BINS:
        return [[int(n), int(n), int(count)] for n, count in zip(values, counts, strict=True)]
    parts = np.array_split(np.sort(lengths), MOST_BINS)
    return [[int(part[0]), int(part[-1]), len(part)] for part in parts]


def lengths_in(path: Path) -> np.ndarray[Any, Any]:
    """The lengths of documents in a file [documents], each at least 1; UserError if there are none."""
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
    """The lengths in a .npy file [documents]; UserError if it is not one array of integers."""
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header is parsed as Python: tokenizer, syntax, memory, ...
        raise UserError(f"{path}: not an array as numpy.save writes it, without objects") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise UserError(f"{path}: holds {what}; lengths are one array of integers [documents]")
    return array.astype(np.int64)


def _lines(path: Path, content: bytes) -> Iterator[int]:
    """The lengths in a text file, one a line; a word in the first line is taken for a column's name."""
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


_TABLES = read_yaml(Path(__file__).with_name("stand_ins.yaml"))
#: the names of training programs
PROGRAMS: tuple[str, ...] = (*_TABLES["programs"][1:],)
#: the grade in :attr:`Measurement.priced_by` of work priced by a stand-in; its share is the whole step
STAND_IN = "stand-in"


class StandIn(NamedTuple):
    """Work of training programs, and the other work that is simulated in its place.

    Attributes:
        by: the work that is simulated; "": it is not known which part of the work takes longer.
        programs: the programs that do the work, "" for a cell that names none; empty: every program.
        backends: the backends with which programs do the work; empty: any backend.
        axis: only cells with several ranks along this axis, "nodes", "experts", "graphs" or "lora"; "": any.
        network: only clusters with a network of this name; "": any.
    """

    work: str
    by: str = ""
    programs: Sequence[str] = ()
    backends: Sequence[str] = ()
    axis: str = ""
    network: str = ""

    @property
    def price(self) -> dict[str, Any]:
        """The entry of :attr:`Measurement.priced_by` for this work."""
        return {"work": self.work, "by": self.by, "grade": STAND_IN, "share": 1.0}

    def __str__(self) -> str:
        """The class of times with this stand-in, as :attr:`Measurement.rates` has it."""
        return f"{self.work} priced as {self.by}" if self.by else f"{self.work}, measured slower"


#: all stand-ins; if a cell has several, the first is the class of its time
STAND_INS = tuple(StandIn(**each) for each in _TABLES["stand_ins"])
COMPILED, LARGEST_LENGTH, *_ = STAND_INS
#: the classes of times with stand-ins
STOOD_IN = tuple(map(str, STAND_INS))


def stand_ins(program: str, backend: str, ranks: Mapping[str, int], network: str = "") -> Iterator[StandIn]:
    """The stand-ins in a cell's step.

    Args:
        program: the cell's training program; "": none.
        backend: the cell's data-parallel backend.
        ranks: the numbers of ranks along each axis, of ``nodes`` and ``experts``; 2 for ``graphs``, ``lora``.
        network: the name of the cluster's network.
    """
    for each in STAND_INS:
        as_run = program in (each.programs or PROGRAMS) and backend in (each.backends or (backend,))
        if as_run and network == (each.network or network) and (not each.axis or ranks.get(each.axis, 1) > 1):
            yield each


def _checked(name: str) -> str:
    if name and name not in PROGRAMS:
        raise ValueError(f"unknown program {shown(name)}{suggestion(name, PROGRAMS)}; others have none")
    return name


#: the name of a program, or ""
Program = Annotated[str, AfterValidator(_checked)]
