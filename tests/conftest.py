"""What every test shares: no network, few threads, and real models, data and a browser where available."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).parent
OFFLINE = TESTS / "support" / "offline"

# Before any framework is imported.  Two workers with a thread pool each would fight for the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        os.environ.setdefault(name, "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TF_CPP_MIN_LOG_LEVEL="2",
    JAX_PLATFORMS="cpu",
    PYTHONPATH=os.pathsep.join([str(OFFLINE), *filter(None, [os.environ.get("PYTHONPATH")])]),
)
sys.path.insert(0, str(OFFLINE))

import offline  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

offline.refuse_network()

# The same examples in every run: a test that fails must fail again.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")

IN_CI = bool(os.environ.get("CI"))
FIXTURE_MARKS = {"real": "real", "chromium": "browser", "browser": "browser"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test by what it uses, so that `-m 'not real'` never misses one."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in FIXTURE_MARKS:
                item.add_marker(FIXTURE_MARKS[fixture])


def lacking(what: str) -> NoReturn:
    """Fail in CI, where everything must be there; elsewhere skip with the way to get it."""
    if IN_CI:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """real("minilm") -> folder of a real model or data set, see scripts/real_models.py for the names."""
    cache = Path(os.environ.get("ATTRACE_CACHE") or Path.home() / ".cache" / "attrace") / "real"

    def folder(name: str) -> Path:
        if not (cache / name / "PROVENANCE.json").is_file():
            lacking(f"{name} is not prepared: run `make real-models`")
        return cache / name

    return folder


@pytest.fixture(scope="session")
def compiler() -> str:
    """Path of a C++ compiler, which torch.compile calls."""
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return path
    lacking("no C++ compiler is installed, which torch.compile needs: install g++")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    lacking("Chromium is not installed: run `make browser` to see how")


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """Playwright's handle on that Chromium; `browser.new_page()` opens a page."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        lacking("playwright is not installed: run `make test`, which installs it")

    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as play:
        handle = play.chromium.launch(executable_path=chromium, args=options)
        yield handle
        handle.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models of every task, saved with their tokenizers."""
    import small

    root = tmp_path_factory.mktemp("models")
    return {task: small.save(task, root / task) for task in small.TASKS}
