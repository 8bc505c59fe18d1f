"""minfer.integrations.transformers.optimize: the same model, the same interfaces, and the way back."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

from minfer.integrations.decoder import Dense  # noqa: E402
from minfer.integrations.decoder.scheme import KINDS, WeightScheme  # noqa: E402
from minfer.integrations.transformers import optimize  # noqa: E402
from minfer.integrations.transformers.model import decoder_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache  # noqa: E402

from .tiny_models import CONFIGS, DEVICES, MOE, assert_as_good, errors, exact_model, random_tokens, tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def padded_tokens(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = random_tokens(3, 13), torch.ones(3, 13, dtype=torch.int64)
    for row, count in ((0, 5), (2, 1)):
        hidden = slice(0, count) if side == "left" else slice(13 - count, 13)
        ids[row, hidden], mask[row, hidden] = 0, 0
    return ids, mask


def stepwise(model, ids: torch.Tensor, first: int, **options) -> torch.Tensor:
    """Logits of all tokens, the first ones in one call and the others one by one."""
    out = model(ids[:, :first], use_cache=True, **options)
    parts = [out.logits]
    for place in range(first, ids.shape[1]):
        out = model(ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, device):
    model, ids = tiny_model(name, device=device), random_tokens(2, 40).to(device)
    truth, theirs = exact_model(model)(ids.cpu()).logits, model(ids).logits
    with optimize(model) as handle:
        assert not handle.left, handle
        assert len(handle.layers) == 3 and None not in handle.layers
        assert_as_good(model(ids, use_cache=False).logits, theirs, truth)
        assert_as_good(stepwise(model, ids, 27), theirs, truth)
        assert_as_good(stepwise(model, ids, 1), theirs, truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, device, side):
    model, (ids, mask) = tiny_model(name, device=device), padded_tokens(side)
    truth = exact_model(model)(ids, attention_mask=mask).logits
    ids, mask, shown = ids.to(device), mask.to(device), mask.bool()
    theirs = model(ids, attention_mask=mask).logits
    with optimize(model):
        for use_cache in (False, True):
            ours = model(ids, attention_mask=mask, use_cache=use_cache).logits
            assert_as_good(ours[shown.to(device)], theirs[shown.to(device)], truth[shown])


@pytest.mark.parametrize("name", CONFIGS)
def test_restore(name):
    model, ids = tiny_model(name), random_tokens(2, 9)
    before, logits = {key: x.clone() for key, x in model.state_dict().items()}, model(ids).logits
    parameters = dict(model.named_parameters())

    def assert_same(state) -> None:
        assert state.keys() == before.keys()
        assert all(torch.equal(x, before[key]) for key, x in state.items())

    for options in ({}, {"weights": "int8", "kv_cache": "int8"}, {"fuse": False}):
        handle = optimize(model, **options)
        assert not torch.equal(model(ids).logits, logits)
        assert_same(model.state_dict())
        handle.restore()
        handle.restore()
        assert_same(model.state_dict())
        assert torch.equal(model(ids).logits, logits)
        assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
        assert "restored" in str(handle)


def test_one_copy_of_each_weight():
    model = tiny_model("llama")
    size = sum(x.untyped_storage().nbytes() for x in model.parameters())

    def held() -> int:
        tensors = [*model.parameters(), *model.buffers()]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    tables = held() - size
    handle = optimize(model)
    assert held() == size + tables
    model.to(torch.float16)
    assert held() == size + tables
    layer = model.model.layers[0]
    assert layer.self_attn.k_proj.weight.untyped_storage().data_ptr() == layer.minfer.attention.qkv.weight.untyped_storage().data_ptr()
    handle.restore()
    assert held() == size + tables and model.dtype == torch.float16


def test_experts_get_contiguous_rows():
    """gpt-oss keeps experts as [in, out], of which each product would make a copy; there is one copy of them, before and after a move."""
    model = tiny_model("gpt_oss")
    state = {key: x.clone() for key, x in model.state_dict().items()}
    handle = optimize(model)
    for dtype in (model.dtype, torch.float16):
        model.to(dtype)
        layer = model.model.layers[0]
        for name, own in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            weight, theirs = getattr(layer.minfer.mlp, own), getattr(layer.mlp.experts, name)
            assert weight.is_contiguous() and weight.dtype == dtype
            assert theirs.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() and torch.equal(theirs, weight.mT)
    handle.restore()
    assert all(x.is_contiguous() for x in model.parameters())
    assert all(torch.equal(x, state[key].half()) for key, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma3", "gpt2"])
def test_generate(name):
    """Greedy, beams, sampling and assisted decoding by transformers' own loop."""
    model, (ids, mask) = tiny_model(name), padded_tokens("left")
    truth = exact_model(model)
    options = dict(attention_mask=mask, max_new_tokens=9, eos_token_id=None)
    with optimize(model):
        greedy = model.generate(ids, do_sample=False, **options)
        assert_greedy(truth, greedy, torch.nn.functional.pad(mask, (0, 9), value=1), 13)
        beams = model.generate(ids, do_sample=False, num_beams=3, **options)
        assert likelihood(truth, beams, mask) >= likelihood(truth, greedy, mask) - 2.0
        drawn = model.generate(ids, do_sample=True, num_return_sequences=2, **options)
        assert drawn.shape == (6, 22)
        one = ids[1:2]
        alone = model.generate(one, do_sample=False, max_new_tokens=9, eos_token_id=None)
        assisted = model.generate(one, do_sample=False, max_new_tokens=9, eos_token_id=None, prompt_lookup_num_tokens=3)
        assert_greedy(truth, assisted, torch.ones_like(assisted), 13)
        assert alone.shape == assisted.shape


def assert_greedy(truth, tokens: torch.Tensor, mask: torch.Tensor, prompt: int) -> None:
    """Each generated token has the largest logit, up to what 16 bits can tell apart (where experts may differ, of most tokens)."""
    logits = truth(tokens, attention_mask=mask, position_ids=positions_of(mask)).logits[:, prompt - 1 : -1]
    chosen = logits.gather(2, tokens[:, prompt:, None])[..., 0]
    behind = (logits.amax(-1) - chosen) / logits.std(-1)
    assert behind.median() <= 0.02 and behind.quantile(0.9) <= 0.4, behind


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """As generate counts them: padding has none."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def likelihood(truth, tokens: torch.Tensor, mask: torch.Tensor) -> float:
    prompt = mask.shape[1]
    whole = torch.nn.functional.pad(mask, (0, tokens.shape[1] - prompt), value=1)
    logprobs = truth(tokens, attention_mask=whole, position_ids=positions_of(whole)).logits[:, prompt - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(2, tokens[:, prompt:, None]).sum(1).mean())


def dequantised(model, weights: str):
    """The model with the weights that a scheme makes of its dense layers', exactly; its activations keep their bits."""
    scheme, model = WeightScheme(weights), copy.deepcopy(model)
    for layer in model.model.layers:
        for linear in layer.modules():
            if isinstance(linear, torch.nn.Linear):
                linear.weight.copy_(scheme.quantize(Dense(linear.weight)).dequantize())
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("weights", ["w4a16", "nf4", "mxfp4", "w8a16"])
def test_weights(name, weights, device):
    """Quantised weights' logits are as near to those of the dequantised weights as transformers' are."""
    model, ids = tiny_model(name, device=device, hidden_size=128, intermediate_size=192), random_tokens(2, 24).to(device)
    reference, state = dequantised(model, weights), {key: x.clone() for key, x in model.state_dict().items()}
    truth, theirs = exact_model(reference)(ids.cpu()).logits, reference(ids).logits
    with optimize(model, weights=weights) as handle:
        assert not handle.left, handle
        assert_as_good(model(ids).logits, theirs, truth)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("weights", [*KINDS, WeightScheme("fp8", -1)], ids=str)
def test_weights_of_every_kind(name, weights, device):
    """Experts and quantised activations too: near to the model's own logits, as near as so many bits let them be."""
    sizes = {} if name == "gpt2" else dict(hidden_size=128, intermediate_size=192)
    model, ids = tiny_model(name, device=device, initializer_range=0.1, **sizes), random_tokens(2, 24).to(device)
    truth = exact_model(model)(ids.cpu()).logits
    with optimize(model, weights=weights) as handle:
        ours, text = model(ids).logits, str(handle)
    if weights == "nf4" and name in MOE and device == "cuda":
        assert "no kernel multiplies experts of nf4" in text
    elif weights == "w8a16" and name in MOE:
        assert "no product of experts" in text
    else:
        assert not handle.left, text
    kind = weights if isinstance(weights, str) else weights.kind
    assert errors(ours, truth).median() <= {"w8a16": 0.08, "int8": 0.15, "fp8": 0.35}.get(kind, 0.9)  # 1.4: unrelated logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("head", ["w4a16", "nf4", "w8a16", "fp8"])
def test_head(name, head, device):
    """A quantised head, also one whose weight is the embedding's; float32 logits in an engine."""
    sizes = (
        dict(n_embd=128, n_inner=192)
        if name == "gpt2"
        else dict(hidden_size=128, intermediate_size=192, tie_word_embeddings=name == "gemma2")
    )
    model, ids = tiny_model(name, device=device, **sizes), random_tokens(2, 24).to(device)
    state, embedding = {key: x.clone() for key, x in model.state_dict().items()}, model.get_input_embeddings().weight
    reference = copy.deepcopy(model)
    linear = reference.get_output_embeddings()
    linear.weight = torch.nn.Parameter(WeightScheme(head).quantize(Dense(linear.weight.detach())).dequantize().to(model.dtype))
    assert reference.get_input_embeddings().weight is not linear.weight
    truth, theirs = exact_model(reference)(ids.cpu()).logits, reference(ids).logits
    with optimize(model, head=head) as handle:
        ours, own = model(ids).logits, decoder_model(handle)
        assert "the head: " + handle.head.weight_format in str(handle) and not handle.left, handle
        assert model.get_input_embeddings().weight is embedding and embedding.numel()
        wide = own.head(torch.ones(3, 128, device=device, dtype=model.dtype), out_dtype=torch.float32)
        assert wide.dtype == torch.float32 and wide.shape == (3, own.vocabulary) == (3, 160)
    if head == "fp8":  # quantised activations
        assert errors(ours, truth).median() <= 0.1
    else:
        assert_as_good(ours, theirs, truth)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_cache", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma2"])
def test_kv_cache(name, kv_cache, device):
    model, ids = tiny_model(name, device=device), random_tokens(2, 75).to(device)
    truth = exact_model(model)(ids.cpu()).logits
    with optimize(model, kv_cache=kv_cache):
        whole, steps = model(ids, use_cache=True).logits, stepwise(model, ids, 40)
    limit = {"int8": 0.06, "fp8": 0.3, "int4": 0.6}[kv_cache]
    assert errors(whole, truth).median() <= limit and errors(steps, truth).median() <= limit


def test_weights_are_gone_where_they_are_not_kept():
    model = tiny_model("llama")
    handle = optimize(model, weights="w4a16", restorable=False)
    ids = random_tokens(1, 5)
    logits = model(ids).logits
    with pytest.raises(RuntimeError, match="restorable was False"):
        handle.restore()
    with pytest.raises(RuntimeError, match="restorable was False"):
        model.state_dict()
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_compile(name):
    torch._dynamo.reset()
    model, ids = tiny_model(name), random_tokens(2, 12)
    truth, theirs = exact_model(model)(ids).logits, model(ids).logits
    with optimize(model):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_as_good(compiled(ids, use_cache=False).logits, theirs, truth)
        cache = StaticCache(model.config, max_cache_len=16)
        parts = [model(ids[:, :9], past_key_values=cache, use_cache=True).logits]
        parts += [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(9, 12)]
        assert_as_good(torch.cat(parts, 1), theirs, truth)


_SIZES = dict(vocab_size=160, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
_SIZES |= dict(max_position_embeddings=256, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_OTHERS = {
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "starcoder2": {},
    "olmoe": dict(num_experts=8, num_experts_per_tok=2),
    "gemma": dict(head_dim=32),
    "deepseek_v3": dict(
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=64, first_k_dense_replace=1,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", _OTHERS)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_unknown_architecture(kind, weights):
    """What applies is replaced, and the report says what was not."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES | _OTHERS[kind])).eval().to(torch.bfloat16)
    (ids, mask), state = padded_tokens("left"), {key: x.clone() for key, x in model.state_dict().items()}
    shown, theirs = mask.bool(), model(ids, attention_mask=mask).logits
    truth = exact_model(model)(ids, attention_mask=mask).logits
    with optimize(model, weights=weights) as handle:
        ours = model(ids, attention_mask=mask).logits
        if weights is None:
            assert_as_good(ours[shown], theirs[shown], truth[shown])
        else:
            assert errors(ours[shown], truth[shown]).median() < 0.2 and any("int8" in text for text in handle.done)
        assert any("as a whole: none of the layers that minfer reads" in text for text in handle.left), handle
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert torch.equal(model(ids, attention_mask=mask).logits, theirs)


def test_a_norm_that_is_none_is_left_alone():
    class OddRMSNorm(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self.eps = weight, 1e-6

        def forward(self, x):
            return x * self.weight

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **_SIZES)).eval().to(torch.bfloat16)
    model.model.norm = OddRMSNorm(model.model.norm.weight)
    with optimize(model) as handle:
        assert handle.left["OddRMSNorm: its forward computes something else, or could not be called"] == 1


def test_errors():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="weights must be one of w4a16"):
        optimize(model, weights="w5a16")
    with pytest.raises(ValueError, match="kv_cache must be None, fp8, int8 or int4, got 'int3'"):
        optimize(model, kv_cache="int3")
    with pytest.raises(ValueError, match="model must be a transformers model, got Linear"):
        optimize(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be in eval mode"):
        optimize(model.train())
    model.eval()
    with pytest.raises(ValueError, match="must be float16 or bfloat16, got torch.float32"):
        optimize(model.float())
    model.bfloat16()
    with pytest.raises(ValueError, match="head must be a scheme of all parts, got parts 'experts'"):
        optimize(model, head=WeightScheme("w4a16", parts="experts"))
    with optimize(model), pytest.raises(ValueError, match="optimised already"):
        optimize(model)
    optimize(model).restore()


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    module = sys.modules["minfer.integrations.transformers.optimize"]
    model, ids = tiny_model("llama"), random_tokens(1, 5)
    logits, state = model(ids).logits, {key: x.clone() for key, x in model.state_dict().items()}
    calls = []
    monkeypatch.setattr(module, "decoder_forward", lambda *a: calls.append(1) or (1 / 0 if len(calls) == 2 else (lambda *x, **y: None)))
    with pytest.raises(ZeroDivisionError):
        optimize(model)
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
