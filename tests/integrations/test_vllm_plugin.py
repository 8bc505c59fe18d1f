"""The vLLM plug-in without vLLM: what it registers by version and by choice, its entry point, and what `minfer doctor` says."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import tomllib
from minfer.cli import doctor, main as cli
from minfer.integrations import vllm as plugin
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(plugin, "_found", None)
    monkeypatch.delenv("MINFER_VLLM", raising=False)


def test_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["minfer"].partition(":")
    assert getattr(sys.modules[module], function) is plugin.register
    (requirement,) = project["optional-dependencies"]["vllm"]
    versions = sorted(plugin.ADAPTERS)
    assert versions == [(0, minor) for minor in range(versions[0][1], versions[-1][1] + 1)]
    assert requirement == f"vllm>=0.{versions[0][1]},<0.{versions[-1][1] + 1}"


@pytest.mark.parametrize("version, reason", [(None, "not installed"), ("0.34.1", "vLLM is 0.34.1"), ("dev", "vLLM is dev")])
def test_other_versions_are_left_alone(monkeypatch, caplog, version, reason):
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        found = plugin.register()
    assert set(found) == set(plugin.PARTS) and not any(part.active for part in found.values())
    assert all(reason in part.note for part in found.values())
    assert len(caplog.records) == (version is not None)  # one line, and none where nobody asked
    assert plugin.register() is found


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc1"])
def test_choice_of_parts(monkeypatch, version):
    from types import SimpleNamespace

    def broken():
        raise ImportError("no such module")

    adapter = SimpleNamespace(register_linear=lambda: "in front", register_experts=broken, register_layers=broken, follow_mode=lambda: None)
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    known = {f".v{version[0]}_{version[2:4]}": adapter}
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name, package: known[name])
    monkeypatch.setenv("MINFER_VLLM", "linear, experts")
    found = plugin.register()
    assert found["linear"] == (True, "in front")
    assert found["experts"] == (False, "ImportError: no such module")
    assert all(found[name] == (False, "MINFER_VLLM leaves it out") for name in ("attention", "layers"))


def test_wrong_choice(monkeypatch):
    monkeypatch.setenv("MINFER_VLLM", "linear,norms")
    with pytest.raises(ValueError, match="MINFER_VLLM must be of linear, experts, attention, layers, or none, got 'linear,norms'"):
        plugin.register()
    monkeypatch.setenv("MINFER_VLLM", "none")
    assert plugin.wanted_parts() == ()


def test_doctor(monkeypatch):
    monkeypatch.setattr(plugin, "installed_version", lambda: None)
    titles = [title for title, _ in doctor.findings()]
    assert titles[0].startswith("minfer ") and titles[1:] == ["vLLM", "other packages"]
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0 and result.output.count("vLLM is not installed") == len(plugin.PARTS)
