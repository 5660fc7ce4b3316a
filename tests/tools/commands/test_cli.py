"""The command line: exit codes; for what a user can get wrong 2, and one short line with what, where, how."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from spbench.bench.command_line.cli import cli, main
from spbench.bench.measure.sweep.results import RESULTS_FILE
from tests.bench.fakes import SCENARIO
from tests.slow import slow
from tests.tools.calibrate.test_logs import SAMPLES
from tests.tools.changes.records import nightly
from tests.tools.commands import test_history, test_list, test_trace
from tests.tools.commands.conftest import Run

RUN = ("run", "--scenario", "small.yaml")


def test_internal_errors_have_a_code_of_their_own(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spbench.bench.tools.papers.execution.run_sweep", lambda *_, **__: 1 / 0)
    code, _, err = spbench(*RUN)
    assert code == 70
    assert err.splitlines()[-1].startswith("spbench: internal error: ZeroDivisionError: division by zero")
    assert "Traceback" not in err
    monkeypatch.setenv("SPBENCH_DEBUG", "1")
    assert "Traceback" in spbench(*RUN)[2]


def test_only_a_failure_of_the_output_is_told_as_one(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the system without a file's name come from processes, sockets and memory, too."""

    def failing(error: OSError) -> tuple[int, str]:
        def sweep(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("spbench.bench.tools.papers.execution.run_sweep", sweep)
        code, _, err = spbench(*RUN)
        return code, err.splitlines()[-1]

    code, said = failing(OSError(errno.EMFILE, "Too many open files"))
    assert (code, "Too many open files" in said, "standard output" in said) == (70, True, False)
    code, said = failing(BrokenPipeError(errno.EPIPE, "Broken pipe"))  # of a pipe to another process
    assert (code, "Broken pipe" in said) == (70, True)
    code, said = failing(OSError(errno.ENOSPC, "No space left on device", "some.file"))
    assert (code, said) == (2, "spbench: cannot write some.file: No space left on device")


#: lines of a shell, of which PYTHON is spbench, what they leave in standard error, and the exit code
SURROUNDINGS = [
    ("PYTHON list clusters >&-", "standard output is closed", 2),
    slow("PYTHON run --scenario x 2>&-", "", 2),
    ("mkdir gone && cd gone && rmdir ../gone && PYTHON list clusters", "the working directory is gone", 2),
    ("ulimit -v 600000 && PYTHON list strategies", "this process may use too little memory", 2),
]


@pytest.mark.parametrize(("line", "message", "code"), SURROUNDINGS)
def test_surroundings_that_do_not_do(tmp_path: Path, line: str, message: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "SPBENCH_CACHE": "off"}
    line = line.replace("PYTHON", f"{sys.executable} -m spbench")
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"spbench: {message}" if message else "")
    assert done.stderr.count("\n") == bool(message)


def test_lists(spbench: Run) -> None:
    code, out, _ = spbench("list")
    assert code == 0
    for name in ("scenarios:", "tensor_parallel", "ring_self_attention", "bert-large", "piz-daint-p100"):
        assert name in out
    assert spbench("list", "clusters")[1] in out
    (of_8b,) = (line for line in out.splitlines() if line.strip().startswith("llama3-8b "))
    assert "layers 32, hidden 4096" in of_8b
    assert "experts" not in of_8b  # which it has not, whatever their number a token would be


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


def test_help_and_listings_do_not_import_torch() -> None:
    code = """
import sys
from spbench.bench.command_line.cli import COMMANDS, exit_code
lists = [f"list {kind}" for kind in ("scenarios", "clusters", "figures")]
for line in ("--help", *(f"{name} --help" for name in COMMANDS.names()), *lists):
    assert exit_code(line.split()) == 0
print(sorted({"torch", "pandas", "rich", "matplotlib"} & set(sys.modules)))
"""
    out, err = spawn("-c", code, stdout=subprocess.PIPE).communicate(timeout=60)
    assert out.splitlines()[-1] == "[]", err


@pytest.mark.parametrize("module", ["spbench.bench.command_line.cli", "click", "spbench.bench.errors"])
def test_an_interrupt_of_the_first_imports_is_told_in_one_line(module: str) -> None:
    """At the import of the command line, in it, and as it begins."""
    code = f"""
import importlib.abc, sys
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from spbench.__main__ import main
main()
"""
    process = spawn("-c", code)
    assert process.communicate(timeout=60)[1] == "spbench: interrupted\n"
    assert process.returncode == 130


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_outputs_that_go_away(options: tuple[str, ...]) -> None:
    command = (*options, "-m", "spbench.bench.command_line.cli", "list", "clusters")
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn(*command, stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141
    with open("/dev/full", "w") as full:
        process = spawn(*command, stdout=full)
        err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (2, "spbench: standard output: No space left on device\n")


def test_what_a_cluster_sets_for_all_processes_is_no_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a command would wait for a rank 0 that nobody has started."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("spbench ")


#: options that decorators take, and what they give the command's body for them
TAKEN = {
    "asked": {"all_variants", "fresh", "jobs", "paper", "write"},
    "sizes": {"batch", "cp", "dp", "pp", "seq_len", "sp", "tp"},
    "shape": {"batch", "cluster", "model", "seq_len", "strategy", "world_size"},
    "narrowing": {"changes", "placed", "variant", "where"},
}


@pytest.mark.parametrize("name", ["advise", "fit", "flags", "import", "reproduce", "trace", "verify"])
def test_a_body_has_the_parameters_that_its_command_gives(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    module, _, function = vars(command.callback)["body"].partition(":")
    body = getattr(importlib.import_module(f"spbench.bench.tools.{module}"), function)
    options = {parameter.name for parameter in command.params} - {"form", "wide", "details", "quiet"}
    parameters = {*inspect.signature(body).parameters}
    grouped = [taken for given, taken in TAKEN.items() if given in parameters]
    assert parameters - options <= {*TAKEN}
    assert options - parameters <= {"strategy"}.union(*grouped)


#: a command line, "->", and words of the message
ERRORS = """
run --scenario max_seqln -> unknown scenario 'max_seqln'
run --scenario absent.yaml -> no scenario file absent.yaml
run taken -> 'taken' is a folder; give the path of a YAML file in it
run huge.yaml -> huge.yaml: defaults.seq_len: must be less than or equal to 68719476736
run itself.yaml -> itself.yaml:1:4: malformed YAML: an alias stands within what it stands for
run small.yaml --set batch=1e400 -> --set batch: must be a valid integer, not inf
list models lamma3 -> no name of models has 'lamma3' in it
list cluster -> which one? spbench list cluster NAME
run --scenario malformed.yaml -> malformed.yaml:1:
run --scenario negative.yaml -> negative.yaml: groups[0].sizes.tp: must be greater than 0, not -2
run -> name a scenario: spbench run SCENARIO
run small.yaml --scenario small.yaml -> name one scenario, once
run small.yaml --strategy tensor_paralel -> unknown strategy 'tensor_paralel'; did you mean 'tensor_parallel'?
run small.yaml --model bert-base -> has no cell with model bert-base
run small.yaml --cluster x -> unknown cluster 'x'
run small.yaml --engine x -> unknown engine 'x'
run small.yaml --world-size four -> 'four' is not a whole number of at least 1
run small.yaml --world-size -4 -> '-4' is not a whole number of at least 1
run small.yaml --jobs 0 -> Invalid value for '--jobs'
run small.yaml --jobs LONG -> (3999 characters)
run small.yaml --timeout 0 -> Invalid value for '--timeout'
run small.yaml --timeout nan -> nan is no time to wait
run small.yaml --format xml -> Invalid value for '--format'
run small.yaml --output small.yaml -> cannot write results to small.yaml/cells.jsonl
run small.yaml --output taken -> cannot write results to taken/cells.jsonl: Is a directory
run small.yaml --scenrio -> No such option '--scenrio'
run small.yaml --set training.backend=fsdp2 -> unknown backend 'fsdp2'; here that is zero3
run small.yaml --set training.moments=2024-13-45 -> training.moments: must be 'kept' or 'later'
run small.yaml --set 'batch=!!int x' -> --set batch: '!!int x' is no value: the tag '!!int' is not read
rnu -> unknown command 'rnu'; did you mean 'run'?
list clustrs -> no name has 'clustrs' in it; did you mean 'clusters'?
run small.yaml --strategy "" -> names nothing; leave the option out
run small.yaml --world-size , -> names nothing
list clusters --figure x.png -> --figure draws one cluster: spbench list cluster NAME

verify --strategy x -> unknown strategy 'x'
verify --strategy megatron_sp+x -> unknown strategy 'x'
verify --strategy usp -> unknown strategy 'usp'; here that is ulysses+ring_attention
verify --strategy lasp+ulysses -> around another strategy; write ulysses+lasp
verify --strategy yunchang_rng -> did you mean 'yunchang_ring'?
verify --model bert-tny -> unknown model 'bert-tny'; did you mean 'bert-tiny'?
verify --model lama3-8b -> unknown model 'lama3-8b'; did you mean 'llama3-8b'?
verify --dtype fp8 -> unknown dtype 'fp8'
verify --part x -> unknown part 'x'
verify --set strategy_options.placement=zigzag -> add --strategy
verify --strategy ring_attention --set strategy_options.placement=zigzg -> is one of contiguous, striped,
verify --strategy ulysses --set strategy_options.pad_head=1 -> did you mean 'pad_heads'?
verify --model gpt3-tiny --set model_options.lairs=1 -> did you mean 'layers'?
verify --set sizes.tp=2 -> verify takes model_options.OPTION, strategy_options.OPTION, training.OPTION
verify --set training.micro_batches=2 -> verify takes model_options.OPTION
fit llama3-8b -> llama3-8b is a model: give --cluster NAME and --seq-len N too
fit lama3-8b -> did you mean 'llama3-8b'? (nearest of
fit qwen3-8b -> did you mean 'Qwen/Qwen3-8B'? (nearest of
fit /dev/null -> '/dev/null' is no scenario, model or file (none of
fit llama3-8b --gpus -8 -> must be a whole number of at least 1, not -8
fit meta-llama/Llama-3-8B -> download its config.json and give the path of that
advise --model llama3-8b -> give --cluster NAME, --gpus N and --seq-len N too

trace traced.yaml --world-size 2 -> 2 cells are left, a trace takes one: bert-tiny/ring_self_attention
trace traced.yaml --variant all --strategy tensor_parallel -> 4 cells are left
trace traced.yaml --strategy tensor_parallel --batch 6 -> no cell that is left has batch 6; they have: 4
trace traced.yaml --strategy single -> no cell with strategy single; it has: tensor_parallel, ring_self
trace traced.yaml --variant slow --strategy tensor_parallel -> cannot be timed: local: device.peak_flops_per_s
trace traced.yaml --strategy tensor_parallel --ranks 0,4 -> --ranks 4: the cell has ranks 0 to 3
trace traced.yaml --strategy tensor_parallel --ranks -1 -> '-1' is not a whole number of at least 0
trace traced.yaml --strategy ring_self_attention --batch 4 --world-size 5 -> cannot be run
trace traced.yaml --where training.backnd=ddp -> did you mean 'training.backend'?
trace traced.yaml --where training.backend=ddp -> has training.backend ddp; they have: legacy_ddp
trace traced.yaml --where training.backend -> 'training.backend' is not SETTING=VALUE, such as training.

flags torchtitan flags.yaml --strategy lasp2 -> torchtitan has no model tnl-1b of these sizes (it has
flags megatron flags.yaml --strategy single --set training.backend=fsdp_flat -> Megatron-LM has no
flags megatrn flags.yaml --strategy single -> there are no flags of 'megatrn'; did you mean 'megatron'?
flags megatron flags.yaml -> 2 cells are left, a command takes one
flags megatron flags.yaml --strategy single --set batch=9 -> cannot be run

calibrate -> give either --scenario
calibrate --engine emulated --scenario rsa_table4 -> give either --scenario
calibrate --engine emulated --fit compute_efficiency:a=b -> give either --scenario
calibrate --from step.json --engine emulated -> give either --scenario
calibrate --scenario rsa_table4 -> --scenario, --table and --fit go together
calibrate --engine distributed --precision fp23 -> unknown precision 'fp23'; did you mean 'fp32'?
calibrate --engine distributed --device cuda -> --device cuda: torch sees no GPU
calibrate --engine emulated --world-size 2 -> --engine emulated measures one device
calibrate --engine emulated --check closed_loop -> --check: it goes with --engine distributed
calibrate --from x.log --check closed_loop -> --check: it goes with --engine distributed
calibrate --engine distributed --check closed_lop -> did you mean 'closed_loop'
calibrate --engine distributed --world-size 3 --check closed_loop -> it has 0 cells on 3 ranks
calibrate --from none.log -> cannot read none.log
calibrate --from step.json --from notes.txt -> notes.txt: no kind of log that can be read
calibrate --from step.json --extends dgx-h101 -> --extends: no packaged cluster 'dgx-h101'; did you
calibrate --from mamf_finder.txt --extends dgx-a100 -> logs come from NVIDIA H100 80GB HBM3, and dgx-a100 has
calibrate --engine emulated --extends dgx-h100 -> --extends goes with --from
calibrate --engine emulated step.json -> step.json: it goes with --from
calibrate --from all_reduce_perf.log --output step.json.yaml step.json.yaml -> --output step.json.yaml

compare a b --strategy lasp -> --strategy needs --run
compare a b --scenario gate -> --scenario needs --run
baseline --scenario gate --output small.yaml -> small.yaml' is a file
flags megatron -> name a scenario: spbench flags KIND SCENARIO
flags small.yaml -> there are no flags of 'small.yaml' (choices: accelerate, megatron, torchtitan)
compare a -> name the results NEW too, or give --run and a --scenario
history absent -> absent: no such folder; spbench record RESULTS --history absent makes it
history history --suite nightli -> did you mean 'nightly'?
history history --metric sent_byte -> did you mean 'sent_bytes'?
history history --cell zzz -> no cell with 'zzz' in its key was recorded on branch main
record absent --history h -> cannot read absent
record absent -> Missing option '--history'
report --output . -> no report
report --output site --results none -> --results
report --output site --history none -> --history
reproduce datasheets -> no clusters in results/reproduction/datasheets: run it in a checkout
reproduce substitutes -> no clusters in results/reproduction/substitutes: run it in a checkout
reproduce bands -> results/reproduction has no times: run spbench reproduce all first
"""
WRONG = [line.split(" -> ") for line in ERRORS.splitlines() if line]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_user_errors_are_one_line(
    spbench: Run, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    Path("malformed.yaml").write_text("groups: [")
    Path("itself.yaml").write_text("a: &a [*a]\n")
    huge = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 99999999999999999999}"
    Path("huge.yaml").write_text(f"title: huge\ndefaults: {huge}\ngroups: [{{}}]\n")
    Path("negative.yaml").write_text(SCENARIO.replace("tp: [1, 2]", "tp: [1, -2]"))
    Path("traced.yaml").write_text(test_trace.SCENARIO)
    Path("flags.yaml").write_text(test_list.SCENARIO)
    Path("taken", RESULTS_FILE).mkdir(parents=True)
    Path("notes.txt").write_text("all_reduce was fast\n")
    shutil.copytree(SAMPLES, ".", dirs_exist_ok=True)
    if line.startswith("history"):
        nightly(Path("history"), 6, test_history.cells)
    before = sorted(Path().rglob("*"))
    code, out, err = spbench(*("x " * 2000 if word == "LONG" else word for word in shlex.split(line)))
    *progress, last = err.splitlines()
    assert (code, out) == (2, "")
    assert last.startswith("spbench: ")
    assert message in last
    assert progress == [] or line.startswith("trace")
    assert len(last) < 600
    assert sorted(Path().rglob("*")) == before
