"""Fixtures, and the rule for tests marked ``gpu``: without a GPU that the build has kernels for they are skipped, and counted."""

import sys

import pytest

GPU_REASON = "requires a GPU"


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    from minfer.planning.plan import runs_here

    if not runs_here():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=GPU_REASON))


def pytest_terminal_summary(terminalreporter):
    skipped = sum(GPU_REASON in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests require a GPU and were skipped")


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers in every run and order."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20)


@pytest.fixture(autouse=True)
def free_memory(request):
    """What a large GPU test freed goes back to the device, so that the next one, or another process, finds all of it."""
    yield
    if "gpu" in request.keywords:
        sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty folder in place of the user's cache."""
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
