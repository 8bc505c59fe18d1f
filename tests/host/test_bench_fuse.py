"""bench.suites.fuse without a GPU: which cells a run begins with, and what a later one leaves out."""

import argparse
import ast
import json

import pytest

from bench.suites import fuse


def listed(capsys, *arguments):
    parser = argparse.ArgumentParser()
    fuse.add_arguments(parser)
    assert fuse.main(parser.parse_args([*arguments, "--dry-run"])) == 0
    return [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("suite", ["rows", "gemm", "attention"])
def test_resume(capsys, tmp_path, suite):
    every = listed(capsys, "--suite", suite)
    assert len({(cell["what"], cell["m"], cell["width"]) for cell in every}) == len(every)
    out = tmp_path / "fuse.json"
    assert listed(capsys, "--suite", suite, "--resume", "--out", str(out)) == every
    rows = [{"suite": suite, "shape": {name: cell[name] for name in ("what", "m", "width")}} for cell in every[::3]]
    rows += [{"suite": "examples", "shape": {"what": every[1]["what"], "m": every[1]["m"], "width": every[1]["width"]}}]
    out.write_text(json.dumps({"rows": rows}))
    assert listed(capsys, "--suite", suite, "--resume", "--out", str(out)) == [cell for i, cell in enumerate(every) if i % 3]


def test_gemm_cells_begin_with_all_kinds(capsys):
    """A run that ends early has seen each kind, and other shapes with each."""
    first = listed(capsys, "--suite", "gemm")[: len(fuse.EPILOGUES)]
    assert (
        len({cell["what"].split()[0] for cell in first})
        == len({(cell["m"], cell["what"].split(" ", 1)[1]) for cell in first})
        == len(first)
    )
