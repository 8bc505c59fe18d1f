"""Models that are divided among GPUs, over NCCL: as over gloo, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from ..integrations.tiny_models import CONFIGS  # noqa: E402
from .cases import architectures, invariant_requests, norms_of_sums, quantised, run_ranks, sampled, sums, sums_in_order  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")]


def test_every_architecture(tmp_path):
    first, second = run_ranks(2, "cuda", tmp_path, architectures, list(CONFIGS), {})
    assert first == second and set(first) == set(CONFIGS)


def test_quantised_weights(tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, head_dim=64, mlp_only_layers=[])
    schemes = {"w4a16": ("w4a16", 128), "fp8": ("fp8", None), "int8": ("int8", None)}
    found = run_ranks(2, "cuda", tmp_path, quantised, ["llama", "qwen3_moe"], schemes, sizes)
    assert found[0] == found[1]
    assert all(all_ranks <= 1.25 * one + 0.01 for one, all_ranks, _ in found[0].values()), found[0]


def test_draws(tmp_path):
    first, second = run_ranks(2, "cuda", tmp_path, sampled)
    assert first == second and all(len(tokens) == 20 for tokens in first)


def test_sums(tmp_path):
    """The same bits on every rank, and what fp32 sums in the order of the ranks are."""
    first, second = run_ranks(2, "cuda", tmp_path, sums)
    assert not first["wrong"] and first == second, (first, second)
    if torch.cuda.can_device_access_peer(0, 1):
        assert first["peers"]


@pytest.mark.parametrize("peer_memory", ["1", "0"])
def test_norms_of_sums(tmp_path, monkeypatch, peer_memory):
    """One launch for the sum, the residual and the norm, and what takes its place without peer memory."""
    monkeypatch.setenv("MINFER_PEER_MEMORY", peer_memory)
    first, second = run_ranks(2, "cuda", tmp_path, norms_of_sums)
    assert not first["wrong"] and first == second, (first, second)
    if torch.cuda.can_device_access_peer(0, 1):
        assert first["peers"] == (peer_memory == "1") and (first["one launch"] > 0) == first["peers"]


@pytest.mark.parametrize("peer_memory", ["1", "0"])
def test_batch_invariant_requests(tmp_path, monkeypatch, peer_memory):
    monkeypatch.setenv("MINFER_PEER_MEMORY", peer_memory)
    assert run_ranks(2, "cuda", tmp_path, invariant_requests, ["llama", "qwen3_moe"]) == [[], []]


@pytest.mark.parametrize("peer_memory", ["1", "0"])
def test_batch_invariant_sums(tmp_path, monkeypatch, peer_memory):
    """Through peer memory and by collectives: the same bits, of few rows and many."""
    monkeypatch.setenv("MINFER_PEER_MEMORY", peer_memory)
    assert run_ranks(2, "cuda", tmp_path, sums_in_order) == [[], []]


def test_sums_without_peer_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_PEER_MEMORY", "0")
    first, second = run_ranks(2, "cuda", tmp_path, architectures, ["llama"], {})
    assert first == second
