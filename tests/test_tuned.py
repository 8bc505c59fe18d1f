"""Tuned tables: the file format, merging, loading, and that planning uses the rows."""

import dataclasses

import minfer
import pytest
import torch
from minfer import shapes, tuned
from minfer.planning import Problem, enumerate_plans, plan_problem
from minfer.tuned import COLUMNS, TunedRow, format_rows, merge_into, parse_rows

H200 = -1
PROBLEM = Problem(64, 4096, 4096)
HEADER = "op,m,n,k,batch,ab_type,a_major,b_major,has_c,gated,kernel,decomposition,splits,swizzle,raster,us"


@pytest.fixture
def no_user_rows():
    yield
    tuned.load_rows("")


def some_row(us=12.34, **changes):
    """A row that the analytic model would not choose."""
    plans = enumerate_plans(PROBLEM, device=H200)
    return dataclasses.replace(TunedRow.of(plans[len(plans) // 2], us), **changes)


def test_columns():
    assert ",".join(COLUMNS) == HEADER
    row = some_row()
    assert (row.op, row.m, row.n, row.k, row.batch, row.ab_type, row.a_major, row.b_major) == ("gemm", 64, 4096, 4096, 1, "bf16", "k", "k")
    assert (row.has_c, row.gated, row.us) == (0, 0, 12.34)


def test_round_trip():
    rows = [some_row(), some_row(m=1), some_row(n=512), some_row(has_c=1), some_row(ab_type="f16")]
    text = format_rows(rows)
    assert text.splitlines()[0] == HEADER
    back = parse_rows(text)
    assert sorted(back) == sorted(rows)
    assert [r.key for r in back] == sorted(r.key for r in rows)
    assert format_rows(back) == text, "stable"
    assert parse_rows("") == [] and parse_rows(HEADER + "\n") == []


@pytest.mark.parametrize(
    "text, message",
    [
        ("op,m\n", "the header must be op,m,n,k"),
        (HEADER + "\ngemm,1,2\n", "row 2: expected 16 cells, got 3"),
        (HEADER + "\n" + "gemm,x,4096,4096,1,bf16,k,k,0,0,kernel,persistent,1,1,along_m,1.0\n", "row 2: invalid literal .*'x'"),
    ],
)
def test_malformed(text, message):
    with pytest.raises(ValueError, match=message):
        parse_rows(text)


def test_merge(tmp_path):
    path = tmp_path / "folder" / "nvidia-h200.csv"
    assert merge_into(path, [some_row(), some_row(m=1)]) == 2
    path.write_text("# reviewed\n" + path.read_text())
    assert merge_into(path, [some_row(us=9.5), some_row(m=2)]) == 3
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# reviewed", HEADER]
    assert [row.m for row in parse_rows(path.read_text())] == [1, 2, 64]
    assert parse_rows(path.read_text())[-1].us == 9.5
    before = path.read_text()
    merge_into(path, [])
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_planning_uses_user_rows(no_user_rows):
    row = some_row()
    before = plan_problem(PROBLEM, device=H200, use_tuned=False)
    assert tuned.load_rows(format_rows([row])) == 1 and tuned.user_rows() == 1
    p = plan_problem(PROBLEM, device=H200)
    assert (p.source, p.kernel, p.decomposition, p.splits) == ("tuned", row.kernel, row.decomposition, row.splits)
    assert (p.swizzle, p.raster) == (row.swizzle, row.raster)
    assert p.predicted_us == pytest.approx(12.34, rel=1e-3)
    assert "user" in p.reason
    assert plan_problem(PROBLEM, device=H200, use_tuned=False).override == before.override
    assert plan_problem(Problem(64, 4096, 4104), device=H200).source == "analytic"
    assert tuned.load_rows("") == 0
    assert "user" not in plan_problem(PROBLEM, device=H200).reason


def test_row_that_cannot_be_used_is_passed_over(no_user_rows):
    """A table of another build may name kernels that are gone or illegal here; planning still answers."""
    wrong_type = next(k["name"] for k in minfer.kernels() if k["ab_type"] == "f16")
    for kernel in ("gemm_sm90_bf16_tn_1x1x1_gone", wrong_type):
        tuned.load_rows(format_rows([some_row(kernel=kernel)]))
        assert plan_problem(PROBLEM, device=H200).kernel != kernel


def test_malformed_table_is_refused(no_user_rows):
    with pytest.raises(RuntimeError, match="line 1: the header must be"):
        tuned.load_rows("a,b\n1,2\n")
    with pytest.raises(RuntimeError, match="line 2: .*decomposition must be"):
        tuned.load_rows(format_rows([some_row(decomposition="magic")]))
    assert tuned.user_rows() == 0


def test_cache_folder(cache_dir, monkeypatch):
    assert tuned.user_table("NVIDIA H200") == cache_dir / minfer.__version__ / "nvidia-h200.csv"
    assert tuned.device_file_name("NVIDIA GeForce RTX 4090 (x)") == "nvidia-geforce-rtx-4090-x"
    monkeypatch.delenv("MINFER_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(tuned.cache_folder()) == f"/home/somebody/.cache/minfer/{minfer.__version__}"


def test_loading_waits_for_cuda(cache_dir, monkeypatch, no_user_rows):
    """Import arranges for the table to be read at CUDA's initialisation, and only where there is one."""
    deferred = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", deferred.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(tuned, "build_info", lambda: minfer.build_info() | {"cuda": True})
    tuned.load_at_first_use()
    assert deferred == []
    merge_into(tuned.user_table("NVIDIA H200"), [some_row()])
    tuned.load_at_first_use()
    assert len(deferred) == 1
    assert tuned.user_rows() == 0
    deferred[0]()
    assert tuned.user_rows() == 1
    tuned.user_table("NVIDIA H200").write_text("nonsense\n")
    with pytest.warns(UserWarning, match="nvidia-h200.csv was not loaded: .*header"):
        deferred[0]()


def test_suites():
    square, llm, heldout = shapes.suite("square"), shapes.suite("llm"), shapes.suite("heldout")
    assert len(square) == 10 and {p.dtype for p in square} == {torch.float16}
    assert len(llm) == 14 * 12
    known = {(p.m, p.n, p.k) for p in (*square, *llm, *shapes.suite("epilogue"))}
    assert len(heldout) >= 50 and not known & {(p.m, p.n, p.k) for p in heldout}
    with pytest.raises(ValueError, match="suite must be one of .*heldout"):
        shapes.suite("all")


def test_shapes():
    assert shapes.parse_shape("16x4096x1024") == Problem(16, 4096, 1024)
    assert shapes.parse_shape(" 1X2x3x4 ", dtype=torch.float16, c=True) == Problem(1, 2, 3, 4, torch.float16, c=True)
    for text in ("", "1x2", "1x2x3x4x5", "axbxc", "1x-2x3"):
        with pytest.raises(ValueError, match="a shape must be MxNxK"):
            shapes.parse_shape(text)
