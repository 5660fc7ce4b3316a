"""Jobs of accelerate by a script: `accelerate launch` with its options, and the Trainer's arguments after the
training script's name; its files (`--config_file`, a config.json) are given beside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table
from spbench.bench.tools.jobs.deepspeed import job_of_contents
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.launch import options_of, shell_of
from spbench.bench.tools.jobs.program_files import CLASSES, class_of_script, script_of, sorted_files
from spbench.bench.tools.jobs.shell_syntax import shown_word

#: `accelerate launch`, or `python -m accelerate.commands.launch`
_STARTS = ("launch", "accelerate.commands.launch")
_LAUNCHER = re.compile(r"\baccelerate launch\b|\baccelerate\.commands\.launch\b")
#: scripts of programs that have readers of their own
_OF_OTHERS = ("pretrain_", "train_step")
#: what options of the launcher are in its file: by what they begin with, and those that choose a section
_SECTIONS = {"fsdp": "fsdp_config", "parallelism_config": "parallelism_config"}
_OF_DEEPSPEED = {
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file"),
    *("gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model", "gradient_accumulation_steps"),
    "seq_parallel_communication_data_type",
}
_CHOSEN = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}
#: that say which file, or whether a section counts
_ELSEWHERE = {"config_file", "use_parallelism_config"}


def read(files: JobFiles) -> Job | None:
    """A job that `accelerate launch` starts; None where the script has no such command.

    Raises:
        UserError: the script cannot be read, has several such commands, or one in a branch.
    """
    script = script_of(files)
    words = _words(script, files) if script is not None and _LAUNCHER.search(script.text) else None
    if script is None or words is None:
        return None
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or PurePosixPath(words[at]).name.startswith(_OF_OTHERS):
        return None
    problems: list[str] = []
    others = JobFiles([file for file in files.files if file is not script])
    contents = sorted_files(others, of_script=True)
    if contents is None:
        return None
    first = next(n for n, word in enumerate(words) if word in _STARTS) + 1
    own = _launcher(words[first:at], problems)
    trainer = dict(options_of(words[at + 1 :], _named("TrainingArguments."), problems))
    if any(word.startswith("--config_file") for word in words[:at]) and "accelerate" not in contents:
        problems.append("--config_file: give this configuration of accelerate beside")
    beside = {name: dict(contents.get(name, {})) for name in ("accelerate", "trainer")}
    contents = {
        **contents,
        CLASSES: contents[CLASSES] or class_of_script(PurePosixPath(words[at]).name),
        "accelerate": {**beside["accelerate"], **own},
        "trainer": {**beside["trainer"], **trainer},
    }
    return job_of_contents("accelerate", contents, files, problems)


def _words(script: JobFile, files: JobFiles) -> Sequence[str] | None:
    """The words of the command that trains; None: there is none."""
    shell = shell_of(script, files.environment)
    commands = [(each, " ".join(map(shown_word, each.words))) for each in shell.commands]
    found = [each for each, text in commands if text.startswith("accelerate launch") or _STARTS[1] in text]
    if len(found) > 1:
        raise script.wrong("several commands train; leave one")
    if found and found[0].branch:
        raise script.wrong(
            f"line {found[0].line}: the command that trains is in a branch; write it by itself"
        )
    return found[0].words if found else None


def _named(prefix: str) -> ArgumentTable:
    """The arguments of the table of DeepSpeed whose names begin so, without that."""
    table = argument_table("deepspeed")
    names = {
        name.removeprefix(prefix): each for name, each in table.arguments.items() if name.startswith(prefix)
    }
    return ArgumentTable(table.program, names, {}, table.content)


def _launcher(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The options of the launcher as its file has them."""
    content: dict[str, Any] = {}
    for name, value in options_of(words, _named("accelerate."), problems):
        prefix = next((each for each in _SECTIONS if name.startswith(f"{each}_")), None)
        if name in _CHOSEN:
            content["distributed_type"] = _CHOSEN[name]
        elif prefix is not None:
            content.setdefault(_SECTIONS[prefix], {})[name] = value
        elif name in _OF_DEEPSPEED:
            content.setdefault("deepspeed_config", {})[name] = value
        elif name not in _ELSEWHERE:
            content[name] = value
    return content
