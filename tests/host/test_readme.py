"""What README.md and docs/ show is run: every Python block, and of every command that its program, options and files exist. Links lead
somewhere, and the README keeps its length.

Blocks of Python are executed in order, those of one section (a ## heading with all below it) in one namespace; the line numbers of an error
are those of the file. Where there is no GPU that the build has kernels for, ``device="cuda"`` becomes ``device="cpu"``, and nothing else is
changed. Blocks of ``>>>`` lines are executed as doctests; output is compared where some is shown. A block that begins with ``# NAME.py, for
torchrun OPTIONS NAME.py`` is run so.
"""

import doctest
import fnmatch
import importlib
import linecache
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import minfer
import pytest
import torch
from minfer._core.registry import kernel_names
from minfer.cli import main as cli
from minfer.planning.plan import runs_here
from typer.main import get_command

from bench.suites.__main__ import FAMILIES
from tests.contracts.test_registration import need

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.exists()]
TORCHRUN = re.compile(r"# (?P<name>\w+\.py), for torchrun (?P<options>.*) (?P=name)$")


class Block(NamedTuple):
    file: str
    section: str
    language: str
    line: int  # of its first line in the file, from 1 on
    text: str


def blocks_of(path: Path) -> list[Block]:
    found, section, begin, language = [], "", None, ""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if begin is None and line.startswith("## "):
            section = line[3:]
        elif line.startswith("```"):
            if begin is None:
                begin, language = number + 1, line[3:].strip()
            else:
                found.append(Block(str(path.relative_to(ROOT)), section, language, begin, "\n".join(lines[begin - 1 : number - 1])))
                begin = None
    assert begin is None, f"{path}: the block of line {begin - 1} has no end"
    return found


BLOCKS = [block for path in FILES for block in blocks_of(path)]
SECTIONS = list(dict.fromkeys((block.file, block.section) for block in BLOCKS if block.language == "python"))


# ---- Python --------------------------------------------------------------------------------------------------------------------


def for_this_machine(text: str) -> str:
    return text if runs_here() else text.replace('device="cuda"', 'device="cpu"')


def execute(block: Block, namespace: dict) -> None:
    """Runs a block; tracebacks and whoever asks for a function's source find it under the file's own line numbers."""
    text = "\n" * (block.line - 1) + for_this_machine(block.text) + "\n"
    name = f"<{block.file}, line {block.line}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), namespace)


class _Examples(doctest.OutputChecker):
    """Where no output is shown, any is right."""

    def check_output(self, want, got, optionflags):
        return want == "" or super().check_output(want, got, optionflags)


def execute_examples(block: Block, namespace: dict) -> None:
    examples = doctest.DocTestParser().get_doctest(for_this_machine(block.text), namespace, block.section, block.file, block.line - 1)
    told = []
    runner = doctest.DocTestRunner(checker=_Examples())
    runner.run(examples, out=told.append, clear_globs=False)
    assert runner.failures == 0, "".join(told)


def execute_with_torchrun(block: Block, folder: Path) -> None:
    words = TORCHRUN.match(block.text.partition("\n")[0])
    path = folder / words["name"]
    path.write_text(for_this_machine(block.text))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(words["options"]), str(path)]
    ranks = int(command[command.index("--nproc-per-node") + 1])
    hidden = {} if runs_here() and torch.cuda.device_count() >= ranks else {"CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | hidden
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def close(have, want, dtype=torch.bfloat16):
    """Two roundings of ``dtype`` apart at most, by norm."""
    have, want = have.double(), want.double()
    assert have.shape == want.shape
    assert (have - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm(), float((have - want).norm() / want.norm())


def check_gemm(names):
    x, weight = names["x"].double(), names["linear"].weight.detach().double()
    assert (names["y"].double() - x @ weight.t()).norm() <= 1e-5 * names["y"].double().norm(), "float32, not rounded to 16 bits"
    close(names["d"], 0.5 * (names["y"].bfloat16().double() @ weight) + x)


def gated_mlp(x, gate, up):
    return torch.nn.functional.silu(x @ gate.double().t()) * (x @ up.double().t())


def check_gated(names):
    close(names["h"], gated_mlp(names["x"].double(), names["gate"].weight, names["up"].weight))


def check_8_bit_d(names):
    d, codes = gated_mlp(names["x"].double(), names["gate"], names["up"]), names["q"].float().double()
    assert (codes * names["scale"].double() - d).norm() <= 0.04 * d.norm(), "three bits of a significand"
    product = (codes * names["scale"].double()) @ names["w2"].float().double().t()
    assert (names["y"].double() - product).norm() <= 0.01 * product.norm()


def check_compiled(names):
    x = names["x"].double()
    close(names["y"], gated_mlp(x, names["gate"], names["up"]) @ names["down"].double().t() + x)


def check_weights(names):
    weight = names["weight"]
    product = names["x"].double() @ weight.dequantize().double().t() + names["linear"].bias.double()
    close(names["y"], torch.nn.functional.silu(product))
    close(names["layer"](names["x"]), product)


def check_loaded(names):
    """The checkpoint's words, taken apart here: code, zero point and scale of one weight in each group."""
    files, weight = names["checkpoint"], names["weight"].dequantize()
    for group in range(4):
        column, row = 128 * group + 11, 37
        code = int(files["qweight"][column // 8, row]) >> 4 * (column % 8) & 15
        zero = (int(files["qzeros"][group, row // 8]) >> 4 * (row % 8) & 15) + 1 & 15
        want = (code - zero) * float(files["scales"][group, row])
        assert abs(float(weight[row, column]) - want) <= 2**-11 * abs(want) + 2**-25


def check_module(names):
    weight = names["module"].weight().dequantize().double()
    assert (weight - names["linear"].weight.double()).norm() < 0.12 * weight.norm(), "4 bits"
    assert names["y"].shape == (3, 256) and bool(names["y"].isfinite().all())


def check_moe_layer(names):
    """Of 16-bit experts: the layer at once, and step by step."""
    want = experts_of(names["x"], names["w13"], names["w2"], names["weights"], names["ids"])
    close(names["out"], want)
    close(names["steps"], want)


def experts_of(x, w13, w2, weights, ids):
    x, out = x.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, experts in enumerate(ids.tolist()):
        for weight, e in zip(weights[t].double(), experts, strict=True):
            gate, up = w13[e].chunk(2)
            out[t] += weight * (w2[e].double() @ gated_mlp(x[t], gate, up))
    return out


def check_moe(names):
    """Of 4-bit experts, whose gate and up rows are in blocks of 8."""
    w13, w2 = names["w13"].dequantize(), names["w2"].dequantize()
    halves = torch.cat([side.flatten(1, 2) for side in w13.view(w13.shape[0], -1, 2, 8, w13.shape[-1]).unbind(2)], dim=1)
    close(names["out"], experts_of(names["x"], halves, w2, names["weights"], names["ids"]))


def check_scaled_experts(names):
    """Of 8-bit experts: what the codes of x and of what is between the products lose, three bits of a significand each."""
    for w13, w2, results in ((names["w13"], names["w2"], ("out", "steps")), (names["loaded13"], names["loaded2"], ("loaded",))):
        want = experts_of(names["x"], *(w.dequantize(torch.float64) for w in (w13, w2)), names["weights"], names["ids"])
        for name in results:
            assert (names[name].double() - want).norm() <= 0.06 * want.norm(), name


def check_grouped_rows(names):
    experts = (0, 0, 2, 3, 3, 3)
    dense = names["w"].float().double() / 256
    want = torch.stack([torch.nn.functional.silu(dense[e] @ row.double()) for e, row in zip(experts, names["x"], strict=True)])
    assert (names["y"].double() - want).norm() <= 0.04 * want.norm(), "three bits of a significand"


def attention_of(q, k, v):
    """q [queries, heads_q, head_dim] over all of k and v [keys, heads_kv, ..]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def check_merged(names):
    want = attention_of(names["q"][0], names["k"][0], names["v"][0])
    assert (names["out"][0].double() - want).norm() <= 4 * torch.finfo(torch.bfloat16).eps * want.norm()


def check_decode(names):
    """Only the last token of each sequence was stored: the keys before it are zeros, of the same weight each."""
    assert names["lse"].shape == (2, 32, 1) and names["cache"].kv_format == "int8"
    for b, length in enumerate(names["seq_lens"].tolist()):
        q, k, v = names["q"][b, 0].double(), names["k"][b].double(), names["v"][b].double()
        score = ((q.view(8, 4, 128) * k[:, None]).sum(-1) * 128**-0.5).exp()
        want = (score / (score + length - 1))[..., None] * v[:, None]
        have = names["out"][b, 0].double().view_as(want)
        assert (have - want).norm() <= 0.02 * want.norm(), "8-bit keys and values"


def check_int4_cache(names):
    out, want = names["out"].double(), attention_of(names["q"][0], names["k"], names["v"])
    assert (out[0] - want).norm() <= 0.25 * want.norm(), "4-bit keys and values"
    assert not out[1].any() and bool(names["lse"][1].isneginf().all()), "the second sequence has no key"


def check_rows(names):
    x, residual, h = names["x"].double(), names["before"].double(), names["hidden"]
    close(names["residual"], x + residual)
    total = names["residual"].double()
    y = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * names["norm_weight"].double()
    close(names["y"], y)
    of_q = names["y"].double() @ names["w_qkv"].double().t()[:, : names["heads"] * names["head_dim"]]
    angles = torch.arange(names["tokens"]).double()[:, None, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    turn = torch.polar(torch.ones_like(angles), angles).to(of_q.device)
    pairs = of_q.view(names["tokens"], names["heads"], 2, 32).transpose(-1, -2).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).transpose(-1, -2).flatten(-2)
    close(names["q"], turned)
    gate, up = (names["y"].double() @ names["w13"].double().t()).chunk(2, -1)
    close(names["h"], torch.nn.functional.silu(gate) * up)
    assert h == 512


def check_codes(names):
    x, weight = names["x"].double(), names["weight"].double()
    y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    assert (names["back"].double() - y).norm() <= 0.04 * y.norm(), "three bits of a significand"
    assert names["same"] is names["one"] and names["norm"].isfinite().all()


def check_readme(names):
    x, linear = names["x"].double(), names["linear"]
    product = x @ linear.weight.double().t() + linear.bias.double()
    close(names["y"], torch.nn.functional.gelu(product))
    close(names["z"], names["y"].double() @ linear.weight.double() + x)
    close(names["h"], gated_mlp(x, names["gate"].weight, names["up"].weight))
    for result, weight in (("y4", "weight"), ("y8", "weight8")):
        close(names[result], x @ names[weight].dequantize().double().t() + linear.bias.double())
    close(names["moe_out"], experts_of(names["states"], names["w13"], names["w2"], names["weights"], names["ids"]))
    for b, last in ((0, 255), (1, 0)):
        want = attention_of(names["q"][b, last : last + 1], names["k"][b, : last + 1], names["v"][b, : last + 1])
        close(names["out"][b, last : last + 1], want)
    for b, length in enumerate(names["seq_lens"].tolist()):
        want = attention_of(names["q_new"][b], names["k"][b, :length], names["v"][b, :length])
        assert (names["decoded"][b].double() - want).norm() <= 0.02 * want.norm(), "8-bit keys and values"
    close(names["normed"], x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    gate, up = names["y"].double().chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    assert (names["codes"].double() * names["scales"] - gated).norm() <= 0.04 * gated.norm(), "three bits of a significand"
    logits = names["logits"].float()
    assert ((logits > logits.gather(1, names["drawn"][:, None])).sum(1) < 50).all()


def check_sampling(names):
    logits = names["logits"].float()
    assert names["greedy"].tolist() == logits.argmax(-1).tolist() and int(names["own"][0]) == int(logits[0].argmax())
    assert int(names["own"][1]) == int(names["alone"]), "the same in any batch"
    rank = (logits > logits.gather(1, names["ids"][:, None])).sum(1)
    assert (rank < 50).all() and ((names["masked"] >= 100) & (names["masked"] < 200)).all()
    close(names["top_logprobs"], logits.double().log_softmax(-1).gather(1, names["top_ids"]))


def check_prepared(names):
    """The queries, and that the keys and values are where the slots say."""
    q = names["qkv"][:, :8].double()
    q = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * names["q_weight"].double()
    cos, sin = names["cos_sin"][names["positions"]].double()[:, None].chunk(2, -1)
    a, b = q.chunk(2, -1)
    close(names["q"], torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    stored = names["cache"].v.double() * names["cache"].v_scale.transpose(1, 2)[..., None]
    close(stored[[0, 3, 5], [40, 7, 1]], names["qkv"][:, 10:].double())
    assert int(names["cache"].v.flatten(2).any(-1).sum()) == 3


def check_rotations(names):
    close(names["back"], names["x"].double())
    close(names["rotated"].double().norm(), names["x"].double().norm())


CHECKS = {
    ("README.md", "Examples"): check_readme,
    ("docs/guides/gemm.md", ""): check_gemm,
    ("docs/guides/gemm.md", "Gated products"): check_gated,
    ("docs/guides/gemm.md", "8-bit D"): check_8_bit_d,
    ("docs/guides/torch_compile.md", ""): check_compiled,
    ("docs/guides/quantized_gemm.md", ""): check_weights,
    ("docs/guides/quantize.md", "Weights"): check_loaded,
    ("docs/guides/quantize.md", "Modules"): check_module,
    ("docs/guides/moe.md", ""): check_moe_layer,
    ("docs/guides/moe.md", "4-bit experts"): check_moe,
    ("docs/guides/moe.md", "8-bit experts"): check_scaled_experts,
    ("docs/guides/scaled_gemm.md", "Experts"): check_grouped_rows,
    ("docs/guides/attention.md", "Merging"): check_merged,
    ("docs/guides/attention.md", "Decode and chunks of prompts"): check_decode,
    ("docs/guides/kv_cache.md", ""): check_int4_cache,
    ("docs/guides/fused.md", ""): check_rows,
    ("docs/guides/fused.md", "8-bit results"): check_codes,
    ("docs/guides/fused.md", "Hadamard rotations"): check_rotations,
    ("docs/guides/kv_cache.md", "Between the GEMM and attention"): check_prepared,
    ("docs/guides/sampling.md", ""): check_sampling,
}


@pytest.mark.parametrize("file, section", SECTIONS, ids=lambda x: x.replace(" ", "-"))
def test_python(file, section, tmp_path):
    namespace: dict = {"__name__": "readme"}
    blocks = [block for block in BLOCKS if (block.file, block.section, block.language) == (file, section, "python")]
    if any("torch.compile" in block.text for block in blocks):
        need("inductor")
    for block in blocks:
        if TORCHRUN.match(block.text.partition("\n")[0]):
            execute_with_torchrun(block, tmp_path)
        elif block.text.startswith(">>>"):
            execute_examples(block, namespace)
        else:
            execute(block, namespace)
    if (file, section) in CHECKS:
        CHECKS[file, section](namespace)


# ---- documents -----------------------------------------------------------------------------------------------------------------

README_LINES = 250


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links_of(path: Path) -> list[tuple[int, str]]:
    """(line, target) of the links to files, pictures and headings; what lies in blocks is no link."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [(number, target) for number, line in enumerate(text.splitlines(), 1) for target in re.findall(r"\]\(([^)\s]+)\)", line)]
    return [(number, target) for number, target in found if "://" not in target]


def broken(path: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    to = path.parent / file if file else path
    if not to.exists() or anchor == "":
        return not to.exists()
    return anchor not in {anchor_of(line.lstrip("#")) for line in to.read_text().splitlines() if line.startswith("#")}


LINKED = [*FILES, ROOT / "third_party" / "README.md"]


@pytest.mark.parametrize("path", LINKED, ids=[str(path.relative_to(ROOT)) for path in LINKED])
def test_links(path):
    wrong = [f"{path.relative_to(ROOT)}:{number}: {target}" for number, target in links_of(path) if broken(path, target)]
    assert not wrong, wrong


def test_every_page_is_linked():
    """From the README, which is where a reader starts."""
    targets = {(ROOT / target.partition("#")[0]).resolve() for _, target in links_of(ROOT / "README.md")}
    assert {path.resolve() for path in FILES if path.name != "README.md"} <= targets


def paths_of(path: Path) -> list[tuple[int, str]]:
    """(line, path) of what the text names in backticks and lies in a folder of this repository; names with <> stand for several."""
    folders = ("cpp/", "python/", "tests/", "bench/", "docs/", "third_party/", ".ci/")
    found = [(n, word) for n, line in enumerate(path.read_text().splitlines(), 1) for word in re.findall(r"`([\w./-]+)`", line)]
    return [(number, word) for number, word in found if word.startswith(folders)]


@pytest.mark.parametrize("path", LINKED, ids=[str(path.relative_to(ROOT)) for path in LINKED])
def test_paths(path):
    wrong = [f"{path.relative_to(ROOT)}:{number}: {word}" for number, word in paths_of(path) if not (ROOT / word).exists()]
    assert not wrong, wrong


def test_every_public_name_is_documented():
    text = "\n".join(path.read_text() for path in FILES)
    public = [*minfer.__all__, *minfer.quantize.__all__, *minfer.nn.__all__, *minfer.distributed.__all__]
    assert not [name for name in public if not name.startswith("__") and not re.search(rf"\b{name}\b", text)]


def test_every_switch_is_documented():
    """Environment variables that our code reads and options of CMake, the latter with their defaults."""
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    files = (ROOT / "CMakeLists.txt", ROOT / "bench" / "cpp" / "CMakeLists.txt", *(ROOT / "third_party").glob("*.cmake"))
    cmake = "\n".join(path.read_text() for path in files)
    options = set(re.findall(r'^set\((\w+) "" CACHE (?:STRING|PATH)', cmake, re.MULTILINE))
    sources = [path for folder in ("cpp", "python", "bench") for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".cpp")]
    code = "\n".join(path.read_text() for path in sources)
    variables = set(re.findall(r'(?:getenv\(|environ\.get\(|environ\[)"(MINFER_\w+)"', code))
    assert len(options) >= 8 and len(variables) >= 4 and options | variables <= rows.keys()
    for name, default in re.findall(r"^minfer_option\((\w+) (\w+)\)", cmake, re.MULTILINE):
        assert f"`{default}`" in rows[name], name


def test_a_wrong_link_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n[a](other.md) [b](#a-heading-of-2) [c](#no) [d](https://example.com)\n```\n[e](in_a_block.md)\n```\n## A heading, of 2\n"
    )
    assert [target for _, target in links_of(page) if broken(page, target)] == ["other.md", "#no"]
    page.write_text("`cpp/src` and `cpp/nothing.cpp` and `cpp/src/<family>` and `x.py`\n")
    assert [word for _, word in paths_of(page) if not (ROOT / word).exists()] == ["cpp/nothing.cpp"]


# ---- Python, continued ---------------------------------------------------------------------------------------------------------


def test_sections_are_there():
    """A section that is renamed keeps its check."""
    assert CHECKS.keys() <= set(SECTIONS)
    assert {block.language for block in BLOCKS} <= {"python", "bash", ""}, "every block says what it is"


def test_a_wrong_block_fails():
    """What this file is for: an undefined name, and an argument that cannot be right, are errors here."""
    with pytest.raises(NameError, match="nobody"):
        execute(Block("README.md", "", "python", 7, "y = nobody.weight"), {})
    with pytest.raises(RuntimeError, match="minfer::gemm: b must have k"):
        execute(
            Block("README.md", "", "python", 7, "import torch, minfer\nminfer.gemm(torch.ones(3, 64).half(), torch.ones(65, 8).half())"), {}
        )
    with pytest.raises(AssertionError, match="NameError"):
        execute_examples(Block("README.md", "", "python", 7, ">>> print(nobody)"), {})
    execute_examples(Block("README.md", "", "python", 7, ">>> print(1 + 1)\n>>> 1 + 1\n2"), {})
    with pytest.raises(AssertionError, match="Expected"):
        execute_examples(Block("README.md", "", "python", 7, ">>> 1 + 1\n3"), {})


# ---- texts ---------------------------------------------------------------------------------------------------------------------


def error_of(call) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


ERRORS = {
    "b must have": lambda: minfer.gemm(torch.ones(3, 64).half(), torch.ones(65, 8).half()),
    "activation must be": lambda: minfer.gemm(torch.ones(3, 64).half(), torch.ones(64, 8).half(), activation="swish"),
    "kernel '": lambda: minfer.gemm(torch.ones(3, 64).half(), torch.ones(64, 8).half(), kernel="gemm_sm90_f16"),
}


def test_errors_are_as_shown():
    shown = [line for block in BLOCKS if block.language == "" for line in block.text.splitlines() if re.match(r"minfer::\w+: ", line)]
    assert len(shown) >= 3
    for line in shown:
        (call,) = [call for begin, call in ERRORS.items() if line.startswith(f"minfer::gemm: {begin}")]
        same, nearest, names = line.partition("nearest: ")
        assert error_of(call) == line or (nearest and error_of(call).startswith(same + nearest)), line
        assert all(name in kernel_names() for name in names.split(", ") if name not in ("", "...")), "kernels that are nearest are"


def test_schemas_are_as_shown():
    """Blocks that begin with an operator's name and an open bracket."""
    shown = 0
    for block in BLOCKS:
        if block.language or not re.match(r"minfer::\w+\(", block.text):
            continue
        for text in re.findall(r"minfer::\w+\(.*?\) -> (?:\([^)]*\)|\S+)", block.text, re.DOTALL):
            shown += 1
            name = re.match(r"minfer::(\w+)", text)[1]
            schema = str(getattr(torch.ops.minfer, name).default._schema)
            assert re.sub(r"\s+", " ", text).replace("=1.0", "=1.").replace("=0.0", "=0.") == schema
    assert shown >= 2


# ---- commands ------------------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """(place, command) of every block of shell lines, of those without a language that call Python, and of `commands` in the text."""
    found = []
    for block in BLOCKS:
        if block.language == "bash" or (block.language == "" and block.text.startswith("python -m ")):
            for number, line in enumerate(block.text.splitlines(), start=block.line):
                found.append((f"{block.file}:{number}", line))
    for path in FILES:
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for number, line in enumerate(text.splitlines(), start=1):
            for command in re.findall(r"`((?:python|cmake|ctest|make|pip) [^`]+)`", line):
                found.append((f"{path.relative_to(ROOT)}:{number}", command))
    # Comments go, and so do the brackets of what may be left out; of alternatives in brackets, each is a command.
    cleaned = [(place, re.sub(r"(^|\s)#.*", "", line)) for place, line in found]
    cleaned = [(place, line.replace("[", "").replace("]", "").strip()) for place, text in cleaned for line in alternatives_of(text)]
    return [(place, line) for place, line in cleaned if line]


def alternatives_of(line: str) -> list[str]:
    """ "a [b | c] d" -> "a b d", "a c d" """
    bars = re.search(r"\[([^][]* \| [^][]*)\]", line)
    if bars is None:
        return [line]
    return [found for way in bars[1].split(" | ") for found in alternatives_of(line[: bars.start()] + way + line[bars.end() :])]


def test_alternatives():
    assert alternatives_of("a [b | c] [d]") == ["a b [d]", "a c [d]"]
    assert alternatives_of("a | b [c]") == ["a | b [c]"]
    assert len({line for _, line in COMMANDS if "tune gemm --shapes" in line}) >= 2


COMMANDS = commands()


def check_minfer(words):
    """Parses the words as python -m minfer would, and runs nothing."""
    command, context = get_command(cli.app), None
    while hasattr(command, "commands") and not (command.invoke_without_command and words and words[0].startswith("--")):
        context = command.make_context(words[0] if words else "minfer", list(words), parent=context, resilient_parsing=True)
        assert words and words[0] in command.commands, f"{words[0] if words else ''} is not one of {', '.join(command.commands)}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context("minfer", list(words), parent=context)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own, of whichever click it has
            raise
        raise AssertionError(error.format_message()) from error


class _Parser(ArgumentParser):
    def error(self, message):
        raise AssertionError(message)


def check_suites(words):
    """That the family's parser takes the options, and the values of choices."""
    if not words:
        return
    parser = _Parser()
    assert words[0] in FAMILIES, words[0]
    importlib.import_module(FAMILIES[words[0]]).add_arguments(parser)
    arguments = parser.parse_args(words[1:])
    known = re.findall(r"[\w:]+", " ".join(action.help or "" for action in parser._actions if action.dest == "suite"))
    for suite in (getattr(arguments, "suite", None) or "").split(","):
        assert not suite or suite in known, f"--suite {suite}: {known}"


def check_module(module, words):
    """That a module of this repository that `python -m` runs is there and knows the options."""
    if module == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words
        return
    path = (ROOT / "python" if module.startswith("minfer.") else ROOT) / Path(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.is_file(), module
    text = file.read_text()
    assert 'if __name__ == "__main__":' in text, module
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, option


def cpp_bench(program):
    """The source of a benchmark."""
    found = list((ROOT / "bench" / "cpp").glob(f"*/{program}.cpp"))
    assert len(found) == 1, f"{program} is no benchmark"
    return found[0]


def check_cpp_bench(program, words):
    source = cpp_bench(program)
    known = set(
        re.findall(
            r'^\s*\{"([a-z-]+)", ', source.read_text() + (ROOT / "bench" / "cpp" / "gemm" / "gemm_bench.cpp").read_text(), re.MULTILINE
        )
    )
    for option in (word for word in words if word.startswith("--")):
        assert option.removeprefix("--") in known | {"help"}, f"{option} is not an option of bench/{program}: {sorted(known)}"


def check_cmake(words):
    text = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "bench" / "cpp" / "CMakeLists.txt").read_text()
    assert words[0] in ("-B", "-S", "--build")
    for word in words:
        if word.startswith("-D"):
            assert re.search(rf"\b{word[2:].partition('=')[0]}\b", text), word
    if "--target" in words:
        targets = [target for target in re.findall(r"add_\w+\((minfer[\w${}]*)", text)]
        for word in words[words.index("--target") + 1 :]:
            assert any(fnmatch.fnmatch(word, target.replace("${family}", "*")) for target in targets), f"{word}: {targets}"
            if word.startswith("minfer_bench_"):
                cpp_bench(word.removeprefix("minfer_bench_"))


@pytest.mark.parametrize("place, command", COMMANDS, ids=[f"{place} {command[:60]}" for place, command in COMMANDS])
def test_command(place, command):
    words = shlex.split(command.replace("...", ""))
    program, rest = words[0], words[1:]
    if words[:3] == ["python", "-m", "minfer"]:
        check_minfer([word for word in words[3:] if word])
    elif words[:3] == ["python", "-m", "bench.suites"]:
        check_suites(words[3:])
    elif program == "python" and rest[0].endswith(".py"):
        text = (ROOT / rest[0]).read_text()
        assert all(f'"{option}"' in text for option in rest[1:] if option.startswith("--")), command
    elif words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif program.startswith("build/bench/bench/"):
        check_cpp_bench(program.removeprefix("build/bench/bench/"), rest)
    elif program == "cmake":
        check_cmake(rest)
    elif program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest), command
    else:
        assert program in ("pip", "ctest"), f"{place}: nobody checks {command}"


def test_commands_are_found():
    programs = {command.split()[0].split("/")[0] for _, command in COMMANDS}
    assert len(COMMANDS) > 30 and programs >= {"make", "cmake", "python", "pip", "build"}


@pytest.mark.parametrize(
    "command, message",
    [
        ("python -m minfer plan gem", "gem is not one of"),
        ("python -m minfer plan gemm --m 1 --n 8", "--k|Missing option"),
        ("python -m minfer plan gemm --m 1 --n 8 --k 8 --quick", "quick"),
        ("python -m bench.suites gem", "gem"),
        ("python -m bench.suites gemm --suit x", "--suite x"),
        ("python -m bench.suites moe --models x --modes y", "unrecognized arguments: --modes y"),
        ("python -m bench.nothing", "bench.nothing"),
        ("python -m pytest tests/host/test_nothing.py", "test_nothing"),
        ("python cpp/codegen/generate.py --lists", "--lists"),
        ("python -m bench.suites.expert_parallel --rank 2", "--rank"),
        ("build/bench/bench/gemm --m 1 --tokens 2", "--tokens is not an option of bench/gemm"),
        ("cmake -B build -DMINFER_CUDA_ARCH=90a", "MINFER_CUDA_ARCH=90a"),
        ("cmake --build build --target minfer_bench_gem", "gem is no benchmark"),
        ("make tests", "make tests"),
        ("minfer info", "nobody checks minfer info"),
    ],
)
def test_a_wrong_command_fails(command, message):
    with pytest.raises(AssertionError, match=message):
        test_command("here", command)
