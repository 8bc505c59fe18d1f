"""moe_router_gemm in a few places of a device: beside a kernel that holds all other SMs until the router has ended, in a green context, and
beside itself on several streams. Its CTAs wait for each other; that it ends however few are resident is argued in router_gemm.cu and
simulated in tests/cpp/test_router_progress.cpp. Every result must have the bits of an undisturbed call.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import minfer
import pytest
import torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NO_BINDINGS = "requires a GPU and cuda.bindings with NVRTC and green contexts"
DEADLINE = 20.0  # seconds, of launches that take milliseconds at most
SIZES = ((256, 7168, 8), (8, 4096, 2), (128, 2048, 8), (1024, 512, 8))
TOKENS = (1, 2, 9, 33, 64)
HOLD = r"""
extern "C" __global__ void hold(int volatile* started, int const volatile* released) {
  long long const begin = clock64();
  started[blockIdx.x] = 1;
  while (*released == 0 && clock64() - begin < 200000000000ll) __nanosleep(1000);
}
"""


def succeed(result):
    """What a call of cuda.bindings returns behind its error code, which must be 0."""
    error, *values = result
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else values


@pytest.fixture(scope="module")
def hold():
    """A kernel of one thread whose block fills an SM, by shared memory, until it is released."""
    driver = pytest.importorskip("cuda.bindings.driver", reason=NO_BINDINGS)
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=NO_BINDINGS)
    properties = torch.cuda.get_device_properties(0)
    torch.cuda.synchronize()  # binds a context
    program = succeed(nvrtc.nvrtcCreateProgram(HOLD.encode(), b"hold.cu", 0, [], []))
    option = f"--gpu-architecture=sm_{properties.major}{properties.minor}".encode()
    succeed(nvrtc.nvrtcCompileProgram(program, 1, [option]))
    cubin = b" " * succeed(nvrtc.nvrtcGetCUBINSize(program))
    succeed(nvrtc.nvrtcGetCUBIN(program, cubin))
    function = succeed(driver.cuModuleGetFunction(succeed(driver.cuModuleLoadData(cubin)), b"hold"))
    size = properties.shared_memory_per_block_optin
    succeed(driver.cuFuncSetAttribute(function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size))
    stream = torch.cuda.Stream(priority=-1)  # of another pool than the routers': torch hands out 32 streams of a priority again and again

    @contextlib.contextmanager
    def all_but(free_sms):
        blocks = properties.multi_processor_count - free_sms
        started, released = (torch.zeros(n, dtype=torch.int32).pin_memory() for n in (blocks, 1))
        values, types = (started.data_ptr(), released.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p)
        torch.cuda.synchronize()
        try:
            succeed(driver.cuLaunchKernel(function, blocks, 1, 1, 1, 1, 1, size, stream.cuda_stream, (values, types), 0))
            assert within(DEADLINE, lambda: bool(started.all())), "the SMs are held by somebody else"
            yield
        finally:
            released.fill_(1)
            torch.cuda.synchronize()

    return all_but


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def gate(tokens, experts, hidden):
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    return x, (torch.randn(experts, hidden, device=DEVICE) * hidden**-0.5).bfloat16()


def same_bits(routed, expected):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(routed, expected, strict=True))


class Replayed:
    """A router in a graph of its own, on a stream of its own, and what it has to return for some inputs."""

    def __init__(self, tokens, experts, hidden, top_k, inputs=4):
        self.stream = torch.cuda.Stream()
        self.name = f"{tokens} tokens, {experts} experts of {hidden}"
        self.x, self.w_gate = gate(tokens, experts, hidden)  # the graph keeps neither
        self.inputs = [torch.randn_like(self.x) for _ in range(inputs)]
        self.expected = [minfer.moe_router_gemm(x, self.w_gate, top_k) for x in self.inputs]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.out = minfer.moe_router_gemm(self.x, self.w_gate, top_k)
        self.seen = []
        self.replay(0)  # whatever is done at the first one
        torch.cuda.synchronize()

    def replay(self, i):
        with torch.cuda.stream(self.stream):
            self.x.copy_(self.inputs[i % len(self.inputs)])
            self.graph.replay()
            self.seen.append((i, [x.clone() for x in self.out]))

    def ended(self):
        return self.stream.query()

    def check(self):
        wrong = [i for i, routed in self.seen if not same_bits(routed, self.expected[i % len(self.inputs)])]
        assert not wrong, f"{self.name}: runs {wrong} of {len(self.seen)}"


@pytest.mark.parametrize("free_sms", [1, 2, 4, 16, 31])
def test_ends_in_a_few_places(hold, free_sms):
    """Every size and number of tokens, eager and replayed. Two CTAs fit on an SM, and 64 tokens' CTAs wait for each other."""
    for experts, hidden, top_k in SIZES:
        routers = [Replayed(tokens, experts, hidden, top_k) for tokens in TOKENS]
        with hold(free_sms):
            for router in routers:
                for i in range(5):
                    router.replay(i)
                assert within(DEADLINE, router.ended), f"{router.name}: waits for a place"
        for router in routers:
            router.check()


@pytest.mark.parametrize("free_sms", [1, 5])
def test_eager_calls_end_in_a_few_places(hold, free_sms):
    cases = [gate(tokens, 256, 7168) for tokens in TOKENS]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [minfer.moe_router_gemm(*case, 8) for case in cases]
        torch.cuda.synchronize()
        with hold(free_sms):
            routed = [[minfer.moe_router_gemm(*case, 8) for _ in range(10)] for case in cases]
            assert within(DEADLINE, stream.query), "waits for a place"
    for results, want in zip(routed, expected, strict=True):
        assert all(same_bits(result, want) for result in results)


@pytest.mark.parametrize("free_sms", [1, 3, 20])
def test_launches_share_a_few_places(hold, free_sms):
    """CTAs of several launches, each of which would wait for others of its own, in places that one launch alone would need."""
    routers = [Replayed(tokens, 256, 7168, 8) for tokens in (64, 64, 33, 16, 5)]
    with hold(free_sms):
        for i in range(20):
            for router in routers:
                router.replay(i)
        assert all(within(DEADLINE, router.ended) for router in routers), "launches wait for each other"
    for router in routers:
        router.check()


def test_many_replays_beside_each_other_and_products():
    """A whole device, busy: some CTAs come late, some leave, most do not."""
    routers = [Replayed(tokens, *size) for tokens in (2, 17, 64) for size in SIZES[:3]]
    a, b = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    products = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(200):
        if i % 4 == 0:
            for stream in products:
                with torch.cuda.stream(stream):
                    a @ b
        for router in routers:
            router.replay(i)
    assert all(within(DEADLINE, router.ended) for router in routers)
    torch.cuda.synchronize()
    for router in routers:
        router.check()


# ---- green contexts ----------------------------------------------------------------------------------------------------------------


def route_in_green_context(sms):
    """In a process of its own: one that waits for ever can only be ended from outside."""
    from cuda.bindings import driver

    torch.cuda.synchronize()
    device = succeed(driver.cuDeviceGet(0))
    resource = succeed(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, count, _ = succeed(driver.cuDevSmResourceSplitByCount(1, resource, 0, sms))
    assert count == 1
    descriptor = succeed(driver.cuDevResourceGenerateDesc([groups[0]], 1))
    context = succeed(driver.cuGreenCtxCreate(descriptor, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    stream = succeed(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    own = torch.cuda.ExternalStream(int(stream))
    for experts, hidden, top_k in SIZES:
        for tokens in TOKENS:
            cases = [gate(tokens, experts, hidden) for _ in range(3)]
            expected = [minfer.moe_router_gemm(*case, top_k) for case in cases]
            torch.cuda.synchronize()
            with torch.cuda.stream(own):
                routed = [[minfer.moe_router_gemm(*case, top_k) for case in cases] for _ in range(5)]
            torch.cuda.synchronize()
            assert all(same_bits(*pair) for results in routed for pair in zip(results, expected, strict=True)), (tokens, experts)
    print("ended")


@pytest.mark.parametrize("sms", [8, 16, 32])
def test_ends_in_a_green_context(sms):
    driver = pytest.importorskip("cuda.bindings.driver", reason=NO_BINDINGS)
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        pytest.skip(NO_BINDINGS)
    script = f"import tests.moe.test_router_progress_gpu as tests; tests.route_in_green_context({sms})"
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["ended"], done.stderr
