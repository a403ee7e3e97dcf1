"""What the project file, the source tree and an installed copy say about each other."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KERNELS = sorted(p for p in (ROOT / "kernels").iterdir() if p.is_file())
# What people wrote: caches, environments and builds lie in other folders or have other suffixes.
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".json", ".md", ".py", ".toml"}
FOLDERS = ("asv_bench", "cupy_staged", "kernels", "tests")
WRITTEN = [ROOT / "Makefile", ROOT / ".ci" / "run"]
WRITTEN += [p for p in ROOT.iterdir() if p.suffix in SUFFIXES]
WRITTEN += [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]


def test_an_installed_copy_has_the_version_of_the_project_file():
    # None is installed when a plain checkout is tested from PYTHONPATH; a stale one would be reported here.
    installed = {d.version for d in distributions(name="cupy-staged")}
    assert installed <= {PROJECT["project"]["version"]}


def test_changelog_has_a_section_for_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(PROJECT['project']['version'])}\]", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["test", "bench"])
def test_extra_and_dependency_group_are_the_same(name):
    assert PROJECT["project"]["optional-dependencies"][name] == PROJECT["dependency-groups"][name]


def test_there_are_kernels():
    assert any(p.suffix == ".cu" for p in KERNELS)


@pytest.mark.parametrize("source", KERNELS, ids=lambda p: p.name)
def test_kernel_sources_include_nothing(source):
    # CuPy's compile cache does not see the text of an included header, and NVRTC may not find it.
    included = re.findall(r"^\s*#\s*include.*", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert included == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_nothing_is_left_for_later(word):
    found = [str(p.relative_to(ROOT)) for p in WRITTEN if re.search(rf"\b{word}\b", p.read_text(encoding="utf-8"))]
    assert found == []


def test_import_needs_neither_the_command_line_nor_the_plot_packages():
    code = "import sys, cupy_staged; print(*sorted({'click', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
