"""The names of our folders are free for users: files of theirs with these names are not imported for ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.user_folder import NAMES, UserFolder

#: what stands on the path where spbench is installed: a folder with nothing else in it
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def user(tmp_path: Path) -> UserFolder:
    return UserFolder(tmp_path, path=[SOURCE])


def test_only_spbench_is_offered() -> None:
    names = {path.name for path in SOURCE.iterdir() if path.suffix != ".egg-info"}
    assert names == {"spbench"}


@pytest.mark.parametrize("name", NAMES)
def test_the_users_file_is_the_one_imported(user: UserFolder, name: str) -> None:
    assert f"imported the {name}.py of the user" in user.run("-c", f"import spbench, {name}").stderr


@pytest.mark.slow
def test_the_command_runs_among_them(user: UserFolder) -> None:
    """Listings, workers in processes of their own, and two real ranks below one of them."""
    listed = user.run("-m", "spbench", "list", "--format", "json")
    assert "ring_self_attention" in json.loads(listed.stdout)["strategies"], listed.stderr
    arguments = ("--scenario", "mine.yaml", "--jobs", "2", "--output", "rows", "--format", "json")
    ran = user.run("-m", "spbench", "run", *arguments)
    statuses = [(row["cell"]["engine"], row["status"]) for row in json.loads(ran.stdout)["rows"]]
    assert statuses == [("virtual", "ok"), ("distributed", "ok"), ("virtual", "ok")], ran.stderr


@pytest.mark.slow
def test_a_suite_of_the_user_imports_spbench(user: UserFolder) -> None:
    done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
