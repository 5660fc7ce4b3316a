"""The way back of sizes.py: a cell of a BERT-Base as a line ``tp=4 batch=8 seq_len=128``."""

import spbench


def flags(cell):
    """The line; what it cannot say is found when it is read back."""
    values = {"tp": cell.sizes.tp, "batch": cell.batch, "seq_len": cell.seq_len}
    settings = {"tp": "sizes.tp"}
    lines = [spbench.Flag(name, str(n), settings.get(name, name)) for name, n in values.items()]
    text = " ".join(f"{line.argument}={line.value}" for line in lines)
    return spbench.Flags("sizes", "job.txt", tuple(lines), f"{text}\n")
