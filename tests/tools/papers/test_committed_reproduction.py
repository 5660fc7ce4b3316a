"""What `spbench reproduce` committed: the documents, and the published numbers and roles in its files."""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spbench.bench import measure
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.trust.bands import packaged_model
from spbench.bench.tools.papers import document, past_errors
from spbench.bench.tools.papers.answer import compare
from spbench.bench.tools.papers.comparison import frame_of, read_comparisons, read_csv, read_records
from spbench.bench.tools.papers.megatron_cases import CASES, of_all_machines, summary
from spbench.bench.tools.papers.paper_findings import PaperFindings, markdown
from spbench.bench.tools.papers.sources import papers, scenarios_of
from spbench.bench.tools.papers.validation import trust_lines
from spbench.bench.yaml_files import read_yaml
from tests.tools.packaged import committed_times, scenarios_of_papers

ROOT = Path(__file__).parents[3]
FILES = ROOT / document.DETAILS_FOLDER
PAPERS = [*papers()]
KEY = ["table", "cell", "quantity", "variant"]
SAME = ["published", "role", "source"]


def test_tables_are_safe_markdown() -> None:
    assert markdown([{"a": "x|y", "b": None, "c": 1}, {"a": "", "b": "", "c": 2}]) == (
        "| a | c |\n|---|---|\n| x\\|y | 1 |\n|  | 2 |\n"
    )
    assert markdown([]) == ""


def test_a_table_of_several_models_names_them() -> None:
    records = findings("rsa").records.query("table == 'rsa-pipeline'")
    ((_, lines), *_) = PaperFindings("rsa", records, []).blocks("rsa_pipeline")
    assert {line["model"] for line in lines} == {"bert-base", "bert-large"}
    base = records[records["cell"].str.contains("bert-base")]
    ((_, lines), *_) = PaperFindings("rsa", base, []).blocks("rsa_pipeline")
    assert {line["model"] for line in lines} == {""}


def test_scenarios_name_papers_that_are_known() -> None:
    known = {name for paper in papers().values() for name in (paper.name, paper.source)}
    for path in (ROOT / "scenarios").glob("*.yaml"):
        assert read_yaml(path).get("paper", "") in {*known, ""}, path
    ((paper, of_rsa),) = scenarios_of("rsa")
    assert paper.name == "rsa"
    assert {"max_batch", "max_seqlen", "communication"} <= {scenario.name for scenario in of_rsa}
    assert [*loaded()] == PAPERS


@cache
def loaded() -> dict[str, list[Scenario]]:
    """The scenarios of each paper that has any."""
    return {paper.name: scenarios for paper, scenarios in scenarios_of_papers()}


@cache
def findings(paper: str) -> PaperFindings:
    records, runs = read_comparisons(FILES / f"{paper}.csv"), read_records(FILES / f"{paper}_runs.csv")
    documents = {scenario.name: scenario.document for scenario in loaded()[paper]}
    return PaperFindings(
        paper, records, runs, documents, past_errors.orders_by_scenario(loaded()[paper], records)
    )


@pytest.mark.parametrize("paper", PAPERS)
def test_the_committed_texts_are_what_the_committed_files_give(
    paper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spbench reproduce PAPER --write` makes all of them; one committed without another is found out."""
    monkeypatch.chdir(ROOT)
    found = findings(paper)
    document.check_documents(paper, found.scenarios)
    documents = document.rendered_documents(found)
    assert [*documents][2:] == {"field": [document.LENGTHS_PAGE]}.get(paper, [])
    for path, text in documents.items():
        assert path.read_text() == text, path
    assert all(run["failed"] == "0" for run in found.runs)


def test_pages_say_how_far_off_times_are_and_of_which_verdicts_they_count() -> None:
    factors = np.exp(past_errors.log_errors(committed_times()))
    half, twice = np.median(abs(factors - 1)), (abs(np.log2(factors)) >= 1).sum()
    said = f"Half of {len(factors):,} published step times are within {half:.1%} of ours. For {twice} of"
    assert said in document.TRUST_PAGE.read_text()


def test_pages_say_how_near_times_tie_and_how_often_their_order_is_right() -> None:
    trust, advice = (" ".join((ROOT / f"docs/{page}.md").read_text().split()) for page in ("trust", "advice"))
    orders = packaged_model().of_orders[measure.ErrorModel.ANY]
    numbers = [each.pairs for each in orders]
    assert f"Each column has {min(numbers)} to {max(numbers)} pairs" in trust
    edges = [f"{100 * low:.0f} to {high:.0%}" for low, high in pairwise(measure.ErrorModel.EDGES[1:-1])]
    assert f"differ by | below {measure.ErrorModel.EDGES[1]:.0%} | {' | '.join(edges)} | more |" in trust
    assert f"| right order | {' | '.join(f'{each.right / each.pairs:.0%}' for each in orders)} |" in trust
    limits = {rates: packaged_model().tie(rates) - 1 for rates in packaged_model().of_ties}
    missing, narrower = limits.pop("substituted"), limits.values()
    assert f"differ by less than a limit of {100 * min(narrower):.0f} to {max(narrower):.0%}" in advice
    assert f"If a rate is missing, the limit is {missing:.0%}." in advice


def test_pages_have_the_errors_of_all_committed_files() -> None:
    """`spbench reproduce PAPER --write` writes them anew."""
    lines = trust_lines(FILES)
    assert markdown(lines) in (ROOT / document.FIRST_PAGE).read_text()
    memory, trust = lines[0], (ROOT / document.TRUST_PAGE).read_text()
    said = f"Half of {memory['numbers']:,} published values are within {memory['median error']} of ours."
    assert f"{said} The worst value is {float(memory['worst'][:-1]):.0f}% off" in trust
    times = past_errors.counted_times(
        [*(FILES / f"{name}.csv" for name in papers()), FILES / "datasheets.csv"]
    )
    assert sum(line["numbers"] for line in lines if "step" in line["quantity"]) == len(times)
    assert markdown(document.headline_lines(FILES)) in (ROOT / document.SUMMARY_PAGE).read_text()


def test_the_page_has_the_errors_of_the_committed_cases() -> None:
    """`spbench reproduce megatron_cases` prints them."""
    decided = [line for line in read_csv(FILES / f"{CASES}_errors.csv")[1] if not line["departs"]]
    lines = [{**line, "error": float(line["error"])} for line in decided]
    assert markdown(of_all_machines([*summary(lines)])) in (ROOT / document.TRUST_PAGE).read_text()


def test_each_saving_by_a_recomputed_module_is_within_a_quarter_of_a_gb() -> None:
    """Moonlight-16B: none saves less than core attention, experts' activation less than latent attention's
    projections, and a second module nothing."""
    lines = findings("experts").of("experts_memory_switches").set_index("table")
    theirs, ours = (lines[name].to_dict() for name in ("published", "reproduced"))
    assert len(theirs) == 6
    for peaks in (theirs, ours):
        saved = {name: peaks["none"] - peak for name, peak in peaks.items()}
        assert saved.pop("none") < min(saved.values()) == saved.pop("core_attn")
        of_latent = {name for name in saved if name.startswith("mla_up_proj")}
        assert min(saved[name] for name in of_latent) > max(saved[name] for name in saved.keys() - of_latent)
        assert max(saved.values()) < 1.08 * min(saved.values())
    assert all(abs((ours["none"] - ours[name]) - (theirs["none"] - theirs[name])) < 0.25 for name in theirs)


def test_the_page_has_the_steps_of_deepspeed_and_their_intervals() -> None:
    """Attention has rates of other cards, for whose share of a step an interval is wider."""
    page = (FILES / "field.md").read_text()
    rows = findings("field").of("deepspeed_zero3")
    for _, row in rows.iterrows():
        tokens, measured = int(row["cell"].split("/L")[1].split("/")[0]), row["published"] / row["reproduced"]
        low, high, _ = packaged_model().band(
            "transferred", row["bound"], row["strategy"], float(row["unknown"]), [row["rates"]]
        )
        assert low < measured < high
        seconds = f"{row['published'] / 1000:.2f} | {row['reproduced'] / 1000:.2f}"
        ends = f"{1 / measured - 1:+.1%} | {low - 1:+.0%} to {high - 1:+.0%}"
        assert f"| {tokens:,} | {seconds} | {ends} |" in page
    assert len(rows) == 4


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_links_to_what_is_there(paper: str) -> None:
    links = re.findall(rf"\(results/reproduction/{paper}\.md#(\w+)\)", (ROOT / "REPRODUCE.md").read_text())
    details = (FILES / f"{paper}.md").read_text()
    links = sorted({*links})
    assert links == sorted(findings(paper).scenarios)
    assert links == sorted(re.findall(r'<a id="(\w+)"></a>', details))
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", details):
        assert (FILES / link).exists(), link


def test_the_page_is_a_page() -> None:
    text = (ROOT / document.SUMMARY_PAGE).read_text()
    assert len(text.splitlines()) < 160
    assert len(text.split()) <= 2030


def test_reasons_on_the_page_are_short() -> None:
    """The rest stands in results/reproduction/PAPER.md."""
    for scenario in (one for scenarios in loaded().values() for one in scenarios):
        assert len(scenario.document.not_reproduced.split()) <= 25, scenario.name


@pytest.mark.parametrize("paper", PAPERS)
def test_the_committed_numbers_are_of_published_ones_as_they_are(paper: str) -> None:
    """No published number, role or source was changed since, and no published number is missing."""
    for scenario in loaded()[paper]:
        committed = findings(paper).of(scenario.name).drop_duplicates(KEY, keep="last")
        entries = frame_of(compare(scenario, Narrowing().declared(scenario), {}))
        entries["table"] = entries["table"].where(entries["table"] != "", entries["claim"])
        entries = entries[(entries["quantity"] != "sent_bytes") & (entries["role"] != "curve")]
        both = entries.merge(committed, on=KEY, how="left", suffixes=("", "_committed"))
        assert len(both) == len(entries)
        assert both[SAME].equals(both[[f"{name}_committed" for name in SAME]].set_axis(SAME, axis=1))
