"""Jobs written as a line ``tp=4 batch=8 seq_len=128`` of a BERT-Base, one argument a word."""

import re

import spbench


def read(files):
    """The job of such a line; None where the file is something else."""
    file = files.the_file()
    words = dict(re.findall(r"(\w+)=(\w+)", file.text.splitlines()[0]))
    if not words.keys() & {"tp", "batch", "seq_len"}:
        return None
    places = {"tp": "sizes.tp", "batch": "batch", "seq_len": "seq_len"}
    arguments, settings = [], [spbench.Setting("model", "bert-base", "the only model")]
    settings += [spbench.Setting("strategy", "tensor_parallel", "the only strategy")]
    for name, value in words.items():
        if name not in places:
            arguments.append(spbench.Argument(name, value, "unknown", ""))
            continue
        settings.append(spbench.Setting(places[name], int(value), f"{name}={value}"))
        arguments.append(spbench.Argument(name, value, "mapped", places[name]))
    if files.cluster:
        settings.append(spbench.Setting("cluster", files.cluster, "--cluster"))
    problems = files.machine_problems(int(words.get("tp", 1)))
    return spbench.Job("sizes", "the program of sizes", files.title, arguments, settings, problems)
