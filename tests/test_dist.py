"""What is published: a wheel, built from the source distribution, that works without the repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="build is not installed")

ROOT = Path(__file__).parents[1]
OURS = ("PYTHONPATH", "ITERAND_COMMIT")
ROOT_FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
# As `make dist` does, without a network.
BUILD = [sys.executable, "-m", "build", "--no-isolation"]


def run(command, folder, **variables):
    """What a command prints in a folder, where the repository is not on Python's path and nothing is cached."""
    environment = {key: value for key, value in os.environ.items() if key not in OURS} | variables
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder with both files."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ROOT_FILES:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    # Where the packages of this environment are in several folders, all of them.
    run(BUILD, folder, PYTHONPATH=os.pathsep.join(packages()))
    return folder / "dist"


def packages():
    """Where the packages of this environment are, iterand not among them."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def ours(path):
    return path.suffix != ".pyc" and path.is_file()


def test_make_dist_builds_the_same():
    assert "python -m build --no-isolation\n" in (ROOT / "Makefile").read_text()


def test_every_file_of_the_package_is_in_the_wheel(published):
    (wheel,) = published.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    assert found == {path.relative_to(source).as_posix() for path in source.glob("iterand/**/*") if ours(path)}
    assert "iterand/lab/experiments/recipes/digits.toml" in found
    assert "iterand/lab/report/template/page.html.j2" in found
    assert "iterand/py.typed" in found


def test_the_source_distribution_holds_the_package_and_no_half_of_the_tests(published):
    (source,) = published.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        found = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {Path(name) for name in ROOT_FILES} <= found
    assert {path.relative_to(ROOT) for path in (ROOT / "src").glob("iterand/**/*") if ours(path)} <= found
    assert not [path for path in found if path.parts[:1] == ("tests",)]


@pytest.fixture(scope="module")
def installed(published, tmp_path_factory):
    """The commands of an environment with the wheel, and what it needs from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name == "posix")
    commands = folder / ("bin" if os.name == "posix" else "Scripts")
    (wheel,) = published.glob("*.whl")
    (python,) = commands.glob("python.exe" if os.name == "nt" else "python")
    options = ["--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], folder)
    own = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"], folder)
    Path(own, "needed.pth").write_text("\n".join(packages()))  # only now, or pip would find iterand among them
    return commands


def test_the_wheel_trains_and_reports(installed, tmp_path):
    where = run([installed / "python", "-c", "import iterand; print(iterand.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    command = installed / "iterand"
    run([command, "reproduce", "digits", "--scale", "tiny", "--device", "cpu", "--jobs", "1"], tmp_path)
    records = {path.parent: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/record.json")}
    tickets = {folder for folder in records if (folder / "model.ticket").exists()}
    assert (len(records), len(tickets)) == (3, 2)
    for folder, record in records.items():
        assert record["environment"]["commit"] is None  # it runs from no repository
        if folder in tickets:
            assert (folder / "model.ticket").stat().st_size == record["result"]["ticket_bytes"]
    assert "report.html: 3 runs in " in run([command, "report", "runs", "--scale", "tiny"], tmp_path)
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
