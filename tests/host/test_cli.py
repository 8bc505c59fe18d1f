"""python -m minfer: info, plan, tune, demo."""

import re
import subprocess
import sys

import minfer
import pytest
import torch
from minfer.cli import main as cli
from minfer.cli.demo import sizes
from minfer.cli.demo.families import cases as demo_cases
from minfer.planning.plan import runs_here
from typer.testing import CliRunner


def invoke(*arguments):
    """Runs a command in this process; returns (exit code, all that it printed)."""
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def plain_console(monkeypatch):
    """The module's console holds the stdout of the time of its import; the runner replaces that."""
    monkeypatch.setattr(cli, "console", cli.Console(highlight=False, soft_wrap=True, width=200))


def test_info(cache_dir):
    code, text = invoke("info")
    assert code == 0
    build = minfer.build_info()
    for expected in (
        f"minfer {minfer.__version__}",
        f"{build['kernels_compiled']} compiled of {build['kernels_total']}",
        "torch 2.10",
        torch.__version__,
        "NVIDIA",
        "shipped rows, 0 user rows",
    ):
        assert expected in text, text
    code, text = invoke("info", "--kernels")
    assert code == 0 and all(kernel["name"] in text for kernel in minfer.kernels())


@pytest.mark.parametrize("command", ["info", "plan gemm", "plan w4a16", "tune gemm", "tune w4a16", "demo"])
def test_help_is_shown_as_it_is_written(command, monkeypatch):
    """Typer reads help as markup, in which a word in square brackets is a style and disappears."""
    monkeypatch.setenv("COLUMNS", "200")
    code, text = invoke(*command.split(), "--help")
    assert code == 0 and "Show this message and exit." in text
    for name, option in vars(cli).items():
        for parameter in getattr(option, "__metadata__", ()):
            assert "[" not in parameter.help, name


def test_plan():
    code, text = invoke("plan", "gemm", "--m", "1", "--n", "4096", "--k", "4096")
    assert code == 0
    assert "1 x 4096 x 4096 bf16 tn" in text and "floor" in text and "gemm_sm" in text
    code, text = invoke("plan", "gemm", "--m", "17", "--n", "4096", "--k", "3", "--dtype", "fp16", "--layout", "nt", "--batch", "3", "--c")
    assert code == 0 and "17 x 4096 x 3 f16 nt, batch 3, with C" in text and ("unaligned" in text or "realign_a=1" in text)
    code, text = invoke("plan", "gemm", "--m", "16", "--n", "4096", "--k", "4096", "--gated", "--all")
    assert code == 0 and "gated" in text and text.count("@decomposition=") > 10
    code, text = invoke("plan", "gemm", "--m", "1", "--n", "4096", "--k", "16384", "--batch-invariant", "--all")
    assert code == 0 and "batch-invariant:" in text and "_sm80_" not in text and len(set(re.findall(r"splits=(\d+)", text))) == 1
    name = next(k["name"] for k in minfer.kernels() if k["ab_type"] == "bf16" and k["compiled"] >= runs_here())
    layout = name.split("_")[3]
    code, text = invoke("plan", "gemm", "--m", "64", "--n", "64", "--k", "64", "--layout", layout, "--kernel", name)
    assert code == 0 and name in text and "override" in text


def test_plan_w4a16():
    code, text = invoke("plan", "w4a16", "--m", "1", "--n", "4096", "--k", "4096")
    assert code == 0
    assert "w4a16_gemm  1 x 4096 x 4096 bf16 int4, groups of 128" in text and "w4a16_sm90_bf16_int4_" in text
    for word in ("predicted", "floor", "why"):
        assert word in text
    code, text = invoke("plan", "w4a16", "--m", "1", "--n", "4096", "--k", "4096", "--batch-invariant")
    assert code == 0 and "batch-invariant:" in text
    more = ("--dtype", "fp16", "--group-size", "32", "--zeros", "--format", "int4", "--gated", "--all")
    code, text = invoke("plan", "w4a16", "--m", "17", "--n", "4096", "--k", "4096", *more)
    assert code == 0 and "f16 int4, groups of 32, zero points, gated" in text and text.count("@decomposition=") > 5
    name = text.splitlines()[-1].split()[2].partition("@")[0]
    code, text = invoke("plan", "w4a16", "--m", "17", "--n", "4096", "--k", "4096", "--dtype", "fp16", "--kernel", name)
    assert code == (0 if not runs_here() or "not in this build" not in text else 1) and name in text
    code, text = invoke("plan", "w4a16", "--m", "17", "--n", "4096", "--k", "4096", "--format", "nf4", "--kernel", "dequantize")
    assert code == 0 and "after dequantisation" in text and "gemm_sm" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "gemm", "--m", "1", "--n", "8"], "--k"),
        (["plan", "gemm", "--m", "-1", "--n", "8", "--k", "8"], "--m"),
        (["plan", "gemm", "--m", "1", "--n", "8", "--k", "8", "--dtype", "fp8"], "fp8"),
        (["plan", "gemm", "--m", "1", "--n", "24", "--k", "8", "--gated"], "n must be a multiple of 16"),
        (["plan", "gemm", "--m", "1", "--n", "16", "--k", "8", "--gated", "--c"], "c must be False for a gated GEMM"),
        (["plan", "w4a16", "--m", "1", "--n", "16", "--k", "8", "--gated", "--c"], "c must be False for a gated GEMM"),
        (["tune", "gemm", "--shapes", "16x128x64", "--gated", "--c"], "c must be False for a gated GEMM"),
        (["tune", "w4a16", "--shapes", "16x128x64", "--gated", "--c"], "c must be False for a gated GEMM"),
        (["plan", "gemm", "--m", "1", "--n", "8", "--k", "8", "--kernel", "nope"], "nearest: gemm_"),
        (["plan", "gemm", "--m", "1", "--n", "8", "--k", "8", "--kernel", "dequantize"], "nearest: "),
        (["plan", "w4a16", "--m", "1", "--n", "20", "--k", "8"], "n must be a multiple of 8"),
        (["plan", "w4a16", "--m", "1", "--n", "8", "--k", "8", "--group-size", "48"], "group_size must be -1 or a power of two"),
        (["plan", "w4a16", "--m", "1", "--n", "8", "--k", "8", "--format", "nf5"], "nf4"),
        (["plan", "w4a16", "--m", "1", "--n", "8", "--k", "8", "--kernel", "nope"], "nearest: "),
        (["tune", "gemm"], "no shapes"),
        (["tune", "w4a16"], "no shapes"),
        (["tune", "w4a16", "--shapes", "1x8x8x2"], "a shape must be MxNxK, got"),
        (["tune", "w4a16", "--suite", "square"], "suite must be one of llm, heldout"),
        (["tune", "w4a16", "--suite", "llm", "--group-size", "20"], "group_size must be -1"),
        (["tune", "gemm", "--shapes", "1x2"], "a shape must be MxNxK"),
        (["tune", "gemm", "--suite", "nope"], "suite must be one of"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors(arguments, message):
    code, text = invoke(*arguments)
    assert code != 0
    assert message in text
    assert "Traceback" not in text


@pytest.mark.skipif(runs_here(), reason="there is a GPU")
def test_tune_without_a_gpu():
    for family in ("gemm", "w4a16"):
        code, text = invoke("tune", family, "--shapes", "16x4096x4096")
        assert code == 1 and "no GPU" in text


@pytest.mark.skipif(runs_here(), reason="there is a GPU: its demo is timed")
def test_demo_on_cpu(tmp_path):
    picture = tmp_path / "folder" / "demo.png"
    code, text = invoke("demo", "--out", str(picture))
    assert code == 0
    for expected in ("SwiGLU", "int4 weight", "int4 experts", "prompt, causal", "decode, int4 cache", "append, fp8_e4m3", "No GPU"):
        assert expected in text
    assert "NO" not in text and text.count(" yes") == len(demo_cases(sizes.CPU))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "matplotlib is not installed" in text
    else:
        assert picture.stat().st_size > 10_000


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "minfer", "info"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(f"minfer {minfer.__version__}"), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "minfer", "plan", "gemm", "--m", "1", "--n", "2", "--k", "3", "--kernel", "x"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and not done.stdout
