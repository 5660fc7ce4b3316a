"""A clone of the checkout, and the distributions built from it, once for all tests."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.api.distributions import ROOT, pip, succeed


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the repository, with the changes that are not committed."""
    folder = tmp_path_factory.mktemp("clone") / "checkout"
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    succeed("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder, cwd=ROOT)
    listed = succeed("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(os.readlink(source))
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        else:
            target.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="session")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    succeed(sys.executable, "-c", build, folder, cwd=checkout)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--wheel-dir", folder, checkout, cwd=folder)
    (made,) = folder.iterdir()
    return made
