"""Logs of nccl-tests: what all_reduce_perf and its like print.

The collective is named in the log, by a line of newer releases or by the command that was run, or in the name
of the file. A file may have several logs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from spbench.bench.tools.calibrate.log_findings import Findings, LogFile, TimedCollective, log_table
from spbench.impls import WIRE_SHARE

_LOG = log_table(__file__)
#: bandwidths are printed in GB/s with two digits after the point, which is too coarse below 1 GB/s
_PRECISE_GB, _ROUNDING = 1.0, 0.01


@dataclass
class _Table:
    """The lines of one run's log that were read so far."""

    program: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    card: str = ""
    #: line number, bytes, us, algbw, busbw, wrong results
    rows: list[tuple[int, int, float, float, float, str]] = field(default_factory=list)
    ended: bool = False


def read(log: LogFile) -> Findings | None:
    """The out-of-place times of each collective and size; None for a log of another kind."""
    if not (_LOG.begin.search(log.text) or _LOG.header.search(log.text)):
        return None
    named = _LOG.program.search(log.path.name)
    tables, remarks = list(_tables(log, named[0] if named else "")), []
    if not any(table.rows for table in tables):
        raise log.damaged("a log of nccl-tests without rows; was the run cut off?")
    collectives: list[TimedCollective] = []
    for table in tables:
        if not table.program:
            raise log.damaged("does not name its collective; name the file as all_gather_perf.log")
        if table.program not in _LOG.programs:
            remarks.append(
                f"{log.path}: {table.program} is passed over (read are {', '.join(_LOG.programs)})"
            )
            continue
        if not table.ended:
            remarks.append(f"{log.path}: {table.program} has no end: the larger sizes may be missing")
        collectives += _timed(log, table)
    programs = list(dict.fromkeys(table.program for table in tables))
    card = ""
    for table in tables:
        card = _same_card(log, card, table.card)
    return Findings(f"{', '.join(programs)} of nccl-tests", card, collectives=collectives, remarks=remarks)


def _tables(log: LogFile, program: str) -> Iterator[_Table]:
    """The tables of a log file, one for each run; ``program``: the program of a run whose log names none."""
    table, named = _Table(program), program
    for number, line in enumerate(log.text.splitlines(), 1):
        if match := _LOG.program.search(line):
            named = match[0]
        if _LOG.begin.search(line):
            if table.rows:
                yield table
            table = _Table(named)
        elif match := _LOG.rank.search(line):
            table.hosts[int(match[1])] = match[2] or ""
            table.card = _same_card(log, table.card, match[3].strip())
        elif (match := _LOG.units.search(line)) and (others := {*match[1].split()} - {*_LOG.known_units}):
            raise log.damaged(f"line {number}: columns in {' and '.join(sorted(others))}, not in us and GB/s")
        elif (match := _LOG.out_of_bounds.search(line)) and match[1].split() != ["0", "OK"]:
            raise log.damaged(f"line {number}: out of bounds values: {match[1]}; do not trust this machine")
        elif match := _LOG.row.search(line):
            size, us, algbw, busbw = int(match[1]), *map(float, match.group(2, 3, 4))
            table.rows.append((number, size, us, algbw, busbw, match[5] or "0"))
        elif _LOG.begun_row.search(line):
            raise log.damaged(f"line {number}: a row of nccl-tests that is not whole")
        table.ended |= _LOG.end.search(line) is not None
        table.program = table.program or named
    yield table


def _same_card(log: LogFile, before: str, card: str) -> str:
    """The card of a run's ranks; UserError if the ranks have different cards."""
    if before and card and card != before:
        raise log.damaged(f"ranks on several cards, {before} and {card}: the slowest has set the pace")
    return card or before


def _timed(log: LogFile, table: _Table) -> Iterator[TimedCollective]:
    ranks, on_hosts = len(table.hosts), Counter(table.hosts.values())
    if ranks == 0:
        raise log.damaged(f"{table.program}: no lines '# Rank 0 ...' that say how many ranks there were")
    if ranks == 1:
        raise log.damaged(f"{table.program} on one rank moves nothing; run it on several")
    if max(table.hosts) + 1 != ranks:
        raise log.damaged(f"{table.program}: {ranks} lines of ranks, of which the last is {max(table.hosts)}")
    if len(set(on_hosts.values())) > 1:
        raise log.damaged(f"{table.program}: hosts have different numbers of ranks: {dict(on_hosts)}")
    collective = _LOG.programs[table.program]
    factor = float(WIRE_SHARE[collective](ranks))
    for number, size, us, algbw, busbw, wrong in table.rows:
        where = f"line {number}: {table.program} of {size} bytes"
        if wrong not in ("0", "N/A"):
            raise log.damaged(f"{where}: {wrong} wrong results; do not trust this machine")
        if algbw >= _PRECISE_GB:
            if abs(us * algbw * 1e3 - size) > _ROUNDING * size:
                raise log.damaged(f"{where}: {us:g} us and {algbw:g} GB/s contradict each other")
            if abs(busbw / algbw / factor - 1) > _ROUNDING:
                raise log.damaged(
                    f"{where}: busbw over algbw is {busbw / algbw:.3g}, but of {ranks} ranks, as listed, "
                    f"{factor:.3g}"
                )
        if size and us:  # a time below the clock's resolution is printed as 0
            yield TimedCollective(collective, ranks, len(on_hosts), size, us / 1e6)
