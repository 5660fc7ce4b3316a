"""OSU's osu_latency: seconds of a message from one rank to another."""

import re

import spbench


def read(log):
    """The messages of two ranks on one node; None where another program wrote the log."""
    if "# OSU MPI" not in log.text:
        return None
    rows = re.findall(r"^(\d+)\s+([\d.]+)$", log.text, re.MULTILINE)
    if not rows:
        raise log.damaged("osu_latency without rows")
    sends = [spbench.TimedCollective("send", 2, 1, int(size), float(us) / 1e6) for size, us in rows]
    return spbench.Findings("osu_latency", collectives=sends)
