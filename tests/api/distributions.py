"""Distributions of spbench, and environments to install them in; nothing is downloaded."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def succeed(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(python: Path | str, *arguments: str | Path, cwd: Path) -> None:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command, *rest = arguments
    succeed(sys.executable, "-m", "pip", "--python", python, command, *options, *rest, cwd=cwd)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment that has this one's packages but spbench."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    mine = [path for path in sys.path if Path(path).name == "site-packages"]  # also of one below this one
    # not a .pth file, which would be followed to an editable install of ours
    for entry in (entry for path in mine for entry in Path(path).iterdir()):
        if "spbench" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
