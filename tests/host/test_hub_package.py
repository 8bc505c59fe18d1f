"""The package for the kernels hub: what it has, that it runs alone, and the hub's rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import minfer
import pytest
from minfer.hub import package

LIBRARY = next(Path(folder) / "_C.so" for folder in minfer.__path__ if (Path(folder) / "_C.so").is_file())
# What a process does with a copy whose namespace is that of the library, in place of minfer itself.
_RUN = """
import importlib.util, sys, torch
folder = sys.argv[1]
spec = importlib.util.spec_from_file_location("copy_of_minfer", folder + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["copy_of_minfer"] = module
spec.loader.exec_module(module)
assert "minfer" not in sys.modules
x, w = torch.randn(5, 64).bfloat16(), torch.randn(32, 64).bfloat16()
linear, mlp = torch.nn.Linear(64, 32).bfloat16(), torch.nn.Module()
for name, sizes in (("gate_proj", (64, 96)), ("up_proj", (64, 96)), ("down_proj", (96, 64))):
    setattr(mlp, name, torch.nn.Linear(*sizes, bias=False).bfloat16())
norm = torch.nn.Module()
norm.weight, norm.variance_epsilon = torch.randn(64).bfloat16(), 1e-6
layers, F = module.layers, torch.nn.functional
with torch.no_grad():
    pairs = [
        (layers.Linear.forward(linear, x[None]), linear(x[None])),
        (layers.RMSNorm.forward(norm, x), F.rms_norm(x.float(), (64,), norm.weight.float(), 1e-6)),
        (layers.SiluAndMul.forward(None, x), F.silu(x[:, :32].float()) * x[:, 32:].float()),
        (layers.SwiGLUMLP.forward(mlp, x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))),
        (module.gemm(x, w.t()), x @ w.t()),
    ]
for ours, theirs in pairs:
    assert ours.shape == theirs.shape and (ours.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()
print("fine", module.build_info()["version"])
"""


def write(folder: Path, **options) -> Path:
    return package.write_package(LIBRARY, "minfer", folder, archs=[], check_symbols=False, **options)


def test_the_package_runs_alone(tmp_path):
    folder = write(tmp_path, version=3)
    assert folder.name == "torch-stable-abi210-cpu-x86_64-linux"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["id"] == "minfer" and metadata["version"] == 3 and metadata["backend"] == {"type": "cpu"}
    assert not (folder / "cli").exists() and not (folder / "integrations").exists()
    run = subprocess.run([sys.executable, "-I", "-c", _RUN, str(folder)], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.startswith("fine"), run.stderr


def test_a_namespace_of_its_own(tmp_path):
    folder = package.write_package(LIBRARY, "minfer_0123abc", tmp_path, archs=["9.0a", "8.0"], check_symbols=False)
    assert folder.name == "torch-stable-abi210-cu130-x86_64-linux"
    assert 'NAMESPACE = "minfer_0123abc"' in (folder / "_core" / "namespace.py").read_text()
    assert json.loads((folder / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["9.0a", "8.0"]}


def test_rules(tmp_path, monkeypatch):
    assert package.impure_layers() == []
    folder = write(tmp_path)
    assert package.foreign_imports(folder) == [] and package.foreign_libraries(LIBRARY) == []
    (folder / "more.py").write_text("import numpy.linalg\nfrom minfer import gemm\nfrom . import ops\nimport torch.nn\n")
    assert package.foreign_imports(folder) == ["more.py: numpy.linalg", "more.py: minfer"]
    monkeypatch.setattr(package, "LIMITS", dict.fromkeys(package.LIMITS, (1, 0)))
    assert any(name.startswith("GLIBC_2.") for name in package.too_new(LIBRARY))
    with pytest.raises(ValueError, match="the hub refuses symbols newer than the hub allows: .*GLIBC_2"):
        package.write_package(LIBRARY, "minfer", tmp_path / "other", archs=[])
    assert not any((tmp_path / "other").rglob("*.so"))
    monkeypatch.setattr(package, "LIMITS", dict.fromkeys(package.LIMITS, (99, 0)))
    assert package.too_new(LIBRARY) == []


@pytest.mark.parametrize("text, expected", [("90a", "9.0a"), ("80", "8.0"), ("120", "12.0"), ("100a", "10.0a")])
def test_architectures(text, expected):
    assert package._arch(text) == expected


def test_kernelize(tmp_path):
    """By the hub's own client. It needs a library with a namespace of its own where minfer is loaded already: here, another process."""
    pytest.importorskip("kernels")
    folder = write(tmp_path)
    script = f"""
import sys, torch
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
@use_kernel_forward_from_hub("RMSNorm")
class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False), 1e-6
    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, (64,), self.weight, 1e-6)
model, x = torch.nn.Sequential(Norm()).eval(), torch.randn(3, 64).bfloat16()
expected = model(x)
repository = LocalLayerRepository(Path({str(folder.parents[1])!r}), layer_name="RMSNorm")
with use_kernel_mapping({{"RMSNorm": {{"cpu": repository}}}}):
    model = kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
assert "RMSNorm.forward" in repr(model[0].forward)
assert (model(x).float() - expected.float()).norm() <= 0.02 * expected.float().norm()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
