"""What the pages say of whether published numbers reproduce, by :mod:`tools.papers.reproduction_verdict`."""

from __future__ import annotations

from collections.abc import Sequence

from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.reproduction_verdict import Word, verdict_on

#: by word, how a sentence in Markdown says it
_BADGES = {
    "yes": "**{good}reproduces**",
    "in part": "**{partly}reproduces in part**",
    "no": "**{bad}does not reproduce**",
    "not run": "**{unjudged}was not run**",
}


def badge(word: Word) -> str:
    """The word as Markdown, in its colour: grey where nothing was judged."""
    return _BADGES[word]


def most_misses(records: Sequence[Comparison]) -> tuple[str, str] | None:
    """The scenario with the most misses and their number, as "2 of 8"; None if all are met."""
    scenarios = dict.fromkeys(record.scenario for record in records)
    verdicts = {name: verdict_on([r for r in records if r.scenario == name]) for name in scenarios}
    name = max(verdicts, key=lambda one: verdicts[one].judged - verdicts[one].met, default=None)
    if name is None or verdicts[name].met == verdicts[name].judged:
        return None
    return name, f"{verdicts[name].judged - verdicts[name].met} of {verdicts[name].judged}"
