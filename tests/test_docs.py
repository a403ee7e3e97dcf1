"""The pages: their examples run, they build without a warning, and a browser shows what is in them."""

import contextlib
import doctest
import functools
import http.server
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import cupy_staged
from cupy_staged.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p.stem for p in DOCS.glob("*.md"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")


def blocks(text, language):
    """Yield the fenced blocks of one language in a page, each with the number of the line that it begins at."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start(1)].count("\n"), found.group(1)


def modules():
    return sorted(m.name for m in pkgutil.iter_modules(cupy_staged.__path__) if m.name != "__main__")


# Examples in pages and docstrings


@pytest.mark.parametrize("page", PAGES)
def test_examples_in_pages(page, monkeypatch):
    """All of a page is one session."""
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "host")
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    parser, names, runner = doctest.DocTestParser(), {}, doctest.DocTestRunner(verbose=False)
    for line, block in blocks(text, "pycon"):
        test = parser.get_doctest(block, {}, f"{page}.md", f"{page}.md", line)
        test.globs = names
        runner.run(test, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0
    assert page != "tutorial" or runner.tries > 30


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name, monkeypatch):
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "host")
    assert doctest.testmod(importlib.import_module(f"cupy_staged.{name}")).failed == 0


@pytest.mark.parametrize("name", [n for n in cupy_staged.__all__ if inspect.isclass(getattr(cupy_staged, n))])
def test_every_public_class_that_is_constructed_has_an_example(name):
    if name in ("CaptureError", "Stats", "UvaStatus", "UvaUnavailableError"):
        return
    assert ">>> " in inspect.getdoc(getattr(cupy_staged, name))


def test_the_program_in_the_readme_runs(tmp_path):
    (program, *more) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    assert not more
    env = {**os.environ, "CUPY_STAGED_DEVICE": "host", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", program[1]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 launch, 3 writes" in done.stdout


# What pages say about the code


def test_the_api_page_names_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:class|function|exception):: (\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(cupy_staged.__all__)


@pytest.mark.parametrize("command", ["info", "demo", "replay"])
def test_the_command_line_page_shows_the_help(command):
    shown = CliRunner().invoke(main, [command, "--help"], prog_name="cupy-staged", terminal_width=80).stdout
    assert f"```text\n{shown.strip()}\n```" in (DOCS / "cli.md").read_text(encoding="utf-8")


def test_the_porting_page_names_only_what_there_is():
    """In a section that is named after a class, ``.name`` on the right of a table is an attribute of it."""
    text = (DOCS / "porting.md").read_text(encoding="utf-8")
    sections = re.split(r"^## `(\w+)`$", text, flags=re.MULTILINE)[1:]
    assert len(sections) // 2 >= 6
    for owner, section in zip(sections[::2], sections[1::2], strict=True):
        thing = getattr(cupy_staged, owner)
        for row in re.findall(r"^\|.*\|(.*)\|$", section, re.MULTILINE):
            for name in re.findall(r"`\.(\w+)", row):
                in_docstring = re.search(rf"^\w*,? ?{name}\b.* : ", inspect.getdoc(thing), re.MULTILINE)
                assert hasattr(thing, name) or in_docstring, f"{owner}.{name}"


def test_commits_are_linted_with_the_ruff_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (ruff,) = (p for p in project["dependency-groups"]["lint"] if p.startswith("ruff"))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"ruff==[^\"]*", hooks)) == {ruff}


def test_the_docs_extra_and_group_are_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["docs"] == project["dependency-groups"]["docs"]


@pytest.mark.parametrize("page", [*PAGES, "../CONTRIBUTING", "../README", "../CHANGELOG"])
def test_links_to_files_lead_somewhere(page):
    path = (DOCS / f"{page}.md").resolve()
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


# The built pages


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the pages as `make docs` does, where a warning, such as for a link that leads nowhere, is an error."""
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'cupy-staged[docs]')")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Found(HTMLParser):
    """Addresses that a page refers to, the ids that it has, and its text."""

    def __init__(self, page):
        super().__init__()
        self.links, self.ids, self.text = [], set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[a] for a in ("href", "src") if attributes.get(a)]
        self.ids |= {attributes["id"]} if "id" in attributes else set()

    def handle_data(self, data):
        self.text += data


def test_no_link_in_the_built_pages_is_broken(built):
    pages = {p: Found(p.read_text(encoding="utf-8")) for p in built.glob("*.html")}
    assert {p.stem for p in pages} >= set(PAGES)
    for page, found in pages.items():
        for link in found.links:
            if "://" in link or link.startswith(("mailto:", "data:")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name.partition("?")[0]).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{page.name}: {link}"


def test_every_public_name_is_on_the_api_page(built):
    text = Found((built / "api.html").read_text(encoding="utf-8")).text
    for name in cupy_staged.__all__:
        thing = getattr(cupy_staged, name)
        assert name in text
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            methods = [m for m, f in inspect.getmembers(thing, inspect.isfunction) if not m.startswith("_")]
            assert all(m in text for m in methods), name


@contextlib.contextmanager
def served(folder):
    """Serve a folder to this machine alone."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def shown(address, tmp_path):
    """Return the page as the browser has it once its scripts have run."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Found(done.stdout)


def figures(markdown):
    """Return the cells of all tables in a page that hold a number."""
    rows = [line.strip().strip("|").split("|") for line in markdown.splitlines() if line.lstrip().startswith("|")]
    return [cell.strip() for row in rows for cell in row if re.fullmatch(r"[0-9][0-9.,]*( %)?", cell.strip())]


@needs_chromium
def test_a_browser_shows_the_figures_of_the_pages(built, tmp_path):
    for page, at_least in (("tutorial", ["319", "177"]), ("performance", [])):
        source = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        with served(built) as address:
            text = shown(f"{address}{page}.html", tmp_path).text
        assert re.search(r"^# (.*)$", source, re.MULTILINE).group(1) in text
        for figure in [*at_least, *figures(source)]:
            assert figure in text, f"{page}: {figure}"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """`asv publish` of one benchmark that needs no GPU, measured here, at the commit of this checkout."""
    pytest.importorskip("asv", exc_type=ImportError)
    sphinxcontrib = pytest.importorskip("sphinxcontrib.jquery", exc_type=ImportError)
    home = tmp_path_factory.mktemp("asv")
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    if shutil.which("git") is None or (head := git(["git", "rev-parse", "HEAD"])).returncode != 0:
        pytest.skip("not a checkout of the repository: asv orders its results by commits")
    conf = (ROOT / "asv_bench" / "asv.conf.json").read_text(encoding="utf-8")
    conf = json.loads("\n".join(line for line in conf.splitlines() if not line.lstrip().startswith("//")))
    folders = {
        "benchmark_dir": str(ROOT / "asv_bench" / conf["benchmark_dir"]),
        "repo": str(ROOT),
        "branches": ["HEAD"],
    }
    folders |= {f"{name}_dir": str(home / name) for name in ("env", "results", "html")}
    (home / "asv.conf.json").write_text(json.dumps(conf | folders))
    env = {**os.environ, "HOME": str(home), "CUPY_STAGED_DEVICE": "host", "ASV_PYTHONPATH": str(ROOT)}
    jquery = Path(sphinxcontrib.__file__).with_name("jquery.js")
    for command in (
        ["machine", "--yes"],
        ["run", "--quick", "--launch-method", "spawn", "--environment", f"existing:{sys.executable}",
         "--set-commit-hash", head.stdout.strip(), "--bench", PUBLISHED],
        ["publish"],
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "asv", *command], cwd=home, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    index = home / "html" / "index.html"
    page, count = re.subn(r"<script src=\"https:.*?</script>\n", "", index.read_text(encoding="utf-8"))
    assert count > 5
    shutil.copy(jquery, index.with_name("jquery.js"))
    index.write_text(page.replace("<head>", f'<head>\n<script src="jquery.js"></script>\n{STAND_INS}', 1))
    return home


PUBLISHED = "replay.*track_"
# asv's pages load their libraries from the network. jQuery comes from a package here; what the others do (plots,
# tooltips, sorting by a click) shows no figure in the table that is read.
STAND_INS = """<script>
$.plot = Object.assign(() => ({}), { plugins: [] });
window.md5 = () => "";
for (const name of ["modal", "popover", "stupidsort", "stupidtable", "tooltip"])
    $.fn[name] = function () { return this; };
</script>"""


@needs_chromium
def test_a_browser_shows_a_measured_figure_on_the_asv_pages(published, tmp_path):
    (result,) = (
        p for p in (published / "results").rglob("*.json") if p.name not in ("machine.json", "benchmarks.json")
    )
    with served(published / "html") as address:
        text = shown(f"{address}#summarylist", tmp_path).text
    read = 0
    for name, (values, params, *_) in json.loads(result.read_text())["results"].items():
        for case, value in zip(itertools.product(*params), values, strict=True):
            if value is None or math.isnan(value):
                continue  # needs a GPU
            label = f"{name} ({', '.join(case)})"
            figure = re.search(re.escape(label) + r"\s*([0-9.e+-]+)", text)
            assert figure, f"{label} is not on the page"
            assert math.isclose(float(figure.group(1)), value, rel_tol=0.01), label
            read += 1
    assert read, "no benchmark gave a value"
