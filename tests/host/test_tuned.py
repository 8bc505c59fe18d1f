"""Tuned tables: the file format, merging, loading, and that planning uses the rows."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import minfer
import pytest
import torch
from minfer.measure import shapes
from minfer.planning import tune, tuned
from minfer.planning.plan import Problem, W4Problem, enumerate_plans, plan_problem
from minfer.planning.tuned import (
    COLUMNS,
    TunedRow,
    format_rows,
    merge_into,
    parse_rows,
)

H200 = -1
PROBLEM = Problem(64, 4096, 4096)
HEADER = (
    "op,m,n,k,batch,ab_type,a_major,b_major,b_format,group_size,has_zeros,has_c,gated,kernel,decomposition,splits,swizzle,raster,columns,us"
)
W4_PROBLEM = W4Problem(24, 4096, 4160)  # no shipped row answers for it


@pytest.fixture
def no_user_rows():
    yield
    tuned.load_rows("")


def some_row(us=12.34, **changes):
    """A row that the analytic model would not choose."""
    return row_of(PROBLEM, us, **changes)


def row_of(problem, us=12.34, **changes):
    plans = enumerate_plans(problem, device=H200)
    return dataclasses.replace(TunedRow.of(plans[len(plans) // 2], us), **changes)


def test_columns():
    assert ",".join(COLUMNS) == HEADER
    row = some_row()
    assert (row.op, row.m, row.n, row.k, row.batch, row.ab_type, row.a_major, row.b_major) == ("gemm", 64, 4096, 4096, 1, "bf16", "k", "k")
    assert (row.b_format, row.group_size, row.has_zeros) == ("dense", 0, 0)
    assert (row.has_c, row.gated, row.us) == (0, 0, 12.34)
    row = row_of(dataclasses.replace(W4_PROBLEM, group_size=8192, zeros=True, gated=True))
    assert (row.op, row.m, row.n, row.k, row.batch, row.ab_type, row.a_major, row.b_major) == (
        "w4a16_gemm",
        24,
        4096,
        4160,
        1,
        "bf16",
        "k",
        "k",
    )
    assert (row.b_format, row.group_size, row.has_zeros, row.has_c, row.gated) == ("int4", -1, 1, 0, 1)


def test_round_trip():
    rows = [some_row(), some_row(m=1), some_row(n=512), some_row(has_c=1), some_row(ab_type="f16")]
    rows += [row_of(W4_PROBLEM), row_of(W4_PROBLEM, group_size=32), row_of(W4_PROBLEM, has_zeros=1)]
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
        (HEADER + "\ngemm,1,2\n", "line 2: expected 20 cells, got 3"),
        ("# tuned\n\n" + HEADER + "\n# a comment\ngemm,1,2\n", "line 5: expected 20 cells, got 3"),
        (
            HEADER + "\n" + "gemm,x,4096,4096,1,bf16,k,k,dense,0,0,0,0,kernel,persistent,1,1,along_m,0,1.0\n",
            "line 2: invalid literal .*'x'",
        ),
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
    assert merge_into(path, [row_of(W4_PROBLEM), row_of(W4_PROBLEM, has_zeros=1), row_of(W4_PROBLEM, 9.0)]) == 5
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


def test_w4a16_planning_uses_rows_of_its_own_format(no_user_rows):
    """The format and the group size must be the problem's; zero points may differ, but a row with the same kind of them comes first."""
    row = row_of(W4_PROBLEM)
    tuned.load_rows(format_rows([row, some_row()]))

    def planned(**changes):
        return plan_problem(dataclasses.replace(W4_PROBLEM, **changes), device=H200)

    p = planned()
    assert (p.source, p.override) == ("tuned", f"{row.kernel}@{p.launch}") and p.predicted_us == pytest.approx(12.34, rel=1e-3)
    assert (p.decomposition, p.splits, p.swizzle, p.raster) == (row.decomposition, row.splits, row.swizzle, row.raster)
    for changes in ({"group_size": 32}, {"group_size": 256}, {"group_size": -1}, {"c": True}, {"gated": True}, {"dtype": torch.float16}):
        assert planned(**changes).source == "analytic", changes
    assert plan_problem(Problem(24, 4096, 4160), device=H200).kernel != row.kernel
    assert planned(zeros=True).override == p.override and planned(zeros=True).reason.endswith("for m = 24, without zero points")
    plans = enumerate_plans(W4_PROBLEM, device=H200)
    own = TunedRow.of(dataclasses.replace(plans[0], problem=dataclasses.replace(W4_PROBLEM, zeros=True)), 10.0)
    tuned.load_rows(format_rows([row, own]))
    assert planned(zeros=True).override == plans[0].override and planned(zeros=True).reason.endswith("for m = 24")
    assert planned().override == p.override
    assert plan_problem(W4_PROBLEM, device=H200, use_tuned=False).source == "analytic"


def test_one_group_has_one_name(no_user_rows):
    """-1 and any size that covers k are the same problem, and the same row."""
    short = dataclasses.replace(W4_PROBLEM, k=512, group_size=-1)
    row = row_of(short)
    assert row.group_size == -1 and dataclasses.replace(short, group_size=512) == dataclasses.replace(short, group_size=1024) == short
    for group_size in (-1, 512, 4096):
        tuned.load_rows(format_rows([dataclasses.replace(row, group_size=group_size)]))
        assert plan_problem(short, device=H200).source == "tuned"
        assert plan_problem(dataclasses.replace(short, group_size=128), device=H200).source == "analytic"


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
    with pytest.raises(RuntimeError, match="line 2: b_format of gemm must be dense, got 'int4'"):
        tuned.load_rows(format_rows([some_row(b_format="int4")]))
    with pytest.raises(RuntimeError, match="line 2: w4_format must be one of int4, .*, got 'int5'"):
        tuned.load_rows(format_rows([row_of(W4_PROBLEM, b_format="int5")]))
    assert tuned.user_rows() == 0


def test_table_of_another_version_is_refused(tmp_path, no_user_rows):
    """The columns before there were 4-bit weights: said clearly, and the file is left alone."""
    path = tmp_path / "nvidia-h200.csv"
    before = HEADER.replace("b_format,group_size,has_zeros,", "") + "\ngemm,1,8,8,1,bf16,k,k,0,0,kernel,persistent,1,1,along_m,0,1.00\n"
    path.write_text(before)
    for refused in (lambda: merge_into(path, [some_row()]), lambda: tune.tune([PROBLEM], out=path)):
        with pytest.raises(ValueError, match="nvidia-h200.csv: the header must be .*; this table is of another version: remove it"):
            refused()
    with pytest.raises(RuntimeError, match="line 1: the header must be .*; this table is of another version: remove it"):
        tuned.load_rows(before)
    assert path.read_text() == before and tuned.user_rows() == 0


def test_cache_folder(cache_dir, monkeypatch):
    assert tuned.user_table("NVIDIA H200") == cache_dir / minfer.__version__ / "nvidia-h200.csv"
    monkeypatch.delenv("MINFER_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(tuned.cache_folder()) == f"/home/somebody/.cache/minfer/{minfer.__version__}"


@pytest.mark.parametrize(
    "name, file_name",
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-40GB (MIG 1g.5gb)", "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        ("NVIDIA GeForce RTX 4090 (x)", "nvidia-geforce-rtx-4090-x"),
        ("nvidia-h200", "nvidia-h200"),
        ("Quadro K620\u212a \u00c9lite\u2122 \u0130", "quadro-k620-lite"),  # lower() of the first and the last has ASCII letters
        ("../../etc/passwd", "etc-passwd"),
        ("a/b\\c:d\te\nf", "a-b-c-d-e-f"),
        ("", "device"),
        ("\u03b1/\u03b2", "device"),
        ("x" * 300, "x" * 254),
        ("x " * 300, "x-" * 127 + "x"),
    ],
)
def test_a_table_is_named_after_its_device(name, file_name):
    assert tuned.device_file_name(name) == file_name
    assert tuned.device_file_name(file_name) == file_name, "naming twice is naming once"


def test_many_merge_at_once(tmp_path):
    """Tuners on several devices of one name: no row is lost. Each has a lock of its own, so that threads stand for processes."""
    row, path = some_row(), tmp_path / "table.csv"

    def tuner(number):
        for m in range(40):
            merge_into(path, [dataclasses.replace(row, m=1000 * number + m)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tuner, range(4)))
    assert len(parse_rows(path.read_text())) == 160
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.fixture
def devices(cache_dir, monkeypatch, no_user_rows):
    """A function that sets the names of the CUDA devices that there are, and what was deferred to CUDA's initialisation."""
    deferred = []
    monkeypatch.setattr(tuned, "when_cuda_is_first_used", deferred.append)
    monkeypatch.setattr(tuned, "build_info", lambda: minfer.build_info() | {"cuda": True})

    def are(*names):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: names[device])
        return deferred

    return are


def test_loading_waits_for_cuda(devices):
    """Import arranges for the table to be read at CUDA's initialisation, and only where there is one."""
    deferred = devices("NVIDIA H200")
    tuned.load_at_first_use()
    assert deferred == []
    merge_into(tuned.user_table("NVIDIA H200"), [some_row()])
    tuned.load_at_first_use()
    assert len(deferred) == 1
    assert tuned.user_rows(0) == 0
    deferred[0]()
    assert (tuned.user_rows(), tuned.user_rows(0), tuned.user_rows(1)) == (0, 1, 0)
    tuned.user_table("NVIDIA H200").write_text("nonsense\n")
    with pytest.warns(UserWarning, match="a tuned table of device 0 was not loaded: .*nvidia-h200.csv: .*header"):
        deferred[0]()
    assert tuned.user_rows(0) == 0
    tuned.user_table("NVIDIA H200").write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match="nvidia-h200.csv: .*decode"):
        deferred[0]()


def test_each_device_has_its_own_table(devices, monkeypatch):
    """Every device gets the table of its name, whatever the others' are, and whichever is the current one."""
    (deferred,) = [devices("NVIDIA H200", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H200", "NVIDIA L40S")]
    calls, load = [], torch.ops.minfer._load_tuned
    monkeypatch.setattr(torch.ops.minfer, "_load_tuned", lambda text, device: calls.append((text, device)) or load(text, device))
    tables = {"NVIDIA H200": [some_row()], "NVIDIA A100-SXM4-40GB MIG 1g.5gb": [some_row(m=1), some_row(m=2)]}
    for name, rows in tables.items():
        merge_into(tuned.user_table(name), rows)
    tuned.load_at_first_use()
    deferred[0]()
    assert [tuned.user_rows(device) for device in range(4)] == [1, 2, 1, 0]
    given = {device: [row.m for row in parse_rows(text)] for text, device in calls if text}
    assert given == {0: [64], 1: [1, 2], 2: [64]}
    assert "user" not in plan_problem(PROBLEM, device=H200).reason, "rows of devices are not everyone's"
    # One broken table is one warning, and the other devices' are loaded.
    tuned.user_table("NVIDIA H200").write_text("nonsense\n")
    with pytest.warns(UserWarning) as warned:
        tuned.load_user_tables()
    assert [str(w.message).split(" was")[0] for w in warned] == [f"minfer: a tuned table of device {i}" for i in (0, 2)]
    assert [tuned.user_rows(device) for device in range(4)] == [0, 2, 0, 0]
    # Rows for all devices take the place of everything.
    assert tuned.load_rows(format_rows([some_row()])) == 1
    assert [tuned.user_rows(device) for device in (None, 0, 1)] == [1, 1, 1]
    assert tuned.load_rows(format_rows([some_row(m=1)]), 1) == 1
    assert [tuned.user_rows(device) for device in (None, 0, 1)] == [1, 1, 2]


def test_suites():
    square, llm, heldout = shapes.suite("square"), shapes.suite("llm"), shapes.suite("heldout")
    assert len(square) == 10 and {p.dtype for p in square} == {torch.float16}
    assert len(llm) == 14 * 12
    known = {(p.m, p.n, p.k) for p in (*square, *llm, *shapes.suite("epilogue"))}
    assert len(heldout) >= 50 and not known & {(p.m, p.n, p.k) for p in heldout}
    with pytest.raises(ValueError, match="suite must be one of .*heldout"):
        shapes.suite("all")
    quantised = shapes.w4_suite("llm", dtype=torch.float16, group_size=32, zeros=True)
    assert [(p.m, p.n, p.k) for p in quantised] == [(p.m, p.n, p.k) for p in llm]
    assert {(p.dtype, p.group_size, p.zeros) for p in quantised} == {(torch.float16, 32, True)}
    assert not {(p.m, p.n, p.k) for p in shapes.w4_suite("heldout")} & {(p.m, p.n, p.k) for p in quantised}
    with pytest.raises(ValueError, match="suite must be one of llm, heldout, got 'square'"):
        shapes.w4_suite("square")


def test_shapes():
    assert shapes.parse_shape("16x4096x1024") == Problem(16, 4096, 1024)
    assert shapes.parse_shape(" 1X2x3x4 ", dtype=torch.float16, c=True) == Problem(1, 2, 3, 4, torch.float16, c=True)
    assert shapes.parse_w4_shape("16x4096x1024", group_size=-1) == W4Problem(16, 4096, 1024, group_size=-1)
    with pytest.raises(ValueError, match="a shape must be MxNxK, got '1x8x8x1'"):
        shapes.parse_w4_shape("1x8x8x1")
    for text in ("", "1x2", "1x2x3x4x5", "axbxc", "1x-2x3"):
        with pytest.raises(ValueError, match="a shape must be MxNxK"):
            shapes.parse_shape(text)
