"""vLLM's Python side: on a GPU, or on a CPU, where its wheel for CUDA is told to be somewhere else. docs/guides/vllm.md says how to install
it for this."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


@pytest.fixture(scope="session", autouse=True)
def process_group(tmp_path_factory):
    """What vLLM's parameters ask for: one rank."""
    pytest.importorskip("vllm")
    import torch.distributed as dist
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = tmp_path_factory.mktemp("vllm") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1)
        if torch.cuda.is_available():
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("cuda", 0))
            torch.set_default_device("cuda")
        yield
        torch.set_default_device("cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def adapter():
    """The module for the installed version of vLLM."""
    from minfer.integrations import vllm as plugin

    return plugin.adapter_of(plugin.installed_version())


@pytest.fixture
def config(process_group):
    """A configuration in which custom ops are on."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))) as found:
        yield found
