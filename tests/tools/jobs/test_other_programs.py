"""Files of other programs are taken for no job of those that are read, and one of several configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.fit.asked import kind_of
from spbench.bench.tools.jobs.job_files import (
    JobFile,
    keyed_program,
    other_programs,
    path_and_part,
    read_job,
    started_program,
)
from tests.tools.jobs.job_inputs import INPUTS
from tests.tools.jobs.test_configurations import IN_PYTHON

FILES = {
    "verl.yaml": "actor_rollout_ref: {model: {path: x}}\ntrainer: {nnodes: 1}\n",
    "mpt.yaml": "max_seq_len: 2048\ntrain_loader: {}\nmax_duration: 1ep\nfsdp_config: {}\n",
    "neox.yml": "pipe_parallel_size: 1\nzero_optimization: {stage: 1}\ntrain_micro_batch_size_per_gpu: 4\n",
    "deepspeed.sh": "torchrun pretrain_gpt.py --num-layers 4 --ds-sequence-parallel-size 4\n",
    "axolotl.sh": "axolotl train long.yaml\n",
    "llama_factory.sh": "FORCE_TORCHRUN=1 llamafactory-cli train long.yaml\n",
    "mindspeed.sh": "torchrun pretrain_gpt.py --num-layers 4 --context-parallel-algo ulysses_cp_algo\n",
    "card.yaml": "verification_index: {}\nverification_environment: {}\nmodel: {hf_id: x}\n",
    "launch.sh": "deepspeed --num_gpus 8 sft.py\n",
    "titan.sh": 'CONFIG_FILE="x.toml"\ntorchrun -m torchtitan.train\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_named_in_a_line(name: str) -> None:
    with pytest.raises(UserError) as error:
        read_job(None, [JobFile(Path(name), FILES[name].encode())], gpus=8, cluster="dgx-h100")
    message = str(error.value)
    assert "which is not read here: " in message
    assert len(message) < 260


def test_no_file_of_a_program_that_is_read_is_taken_for_anothers() -> None:
    scripts = [JobFile(Path("train.sh"), b"accelerate launch pretrain_gpt.py --num-layers 4\n")]
    files = [JobFile(path, path.read_bytes()) for path in INPUTS.iterdir()] + scripts
    assert len(files) > 10
    assert not [f for f in files if keyed_program(f) or started_program(f, unread=False)]
    assert all(program.keys() & {"keys", "text", "even_then"} for program in other_programs().values())


def test_one_of_several_configurations_is_named(tmp_path: Path) -> None:
    path = tmp_path / "registry.py"
    path.write_text(IN_PYTHON + IN_PYTHON.replace("llama3_70b", "longer").replace("4 * 2048", "16384"))
    how = {"gpus": 64, "cluster": "dgx-h100"}
    with pytest.raises(UserError, match=r"2 functions make .*; name one, as .*registry.py:llama3_70b"):
        read_job(None, [path], **how)
    job = read_job(None, [f"{path}:longer"], **how)
    assert (job.cell().seq_len, job.title) == (16384, "registry.py:longer")
    with pytest.raises(UserError, match=r"no function 'longr' .*did you mean 'longer'"):
        read_job("torchtitan", [f"{path}:longr"], **how)
    assert {kind_of([str(path)]), kind_of([f"{path}:longer"])} == {"job"}
    assert path_and_part("job.sh:x") == (Path("job.sh:x"), "")
