"""EAGLE3 heads against PyTorch written from their formulas, from a checkpoint in the public layout to drafted ids.

The reference runs over all rows anew in every step and keeps no cache; it shares nothing with the code under test.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.convert import convert_checkpoint
from jaxspec.loading.checkpoint import load_eagle3, load_params, open_checkpoint
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.models.eagle3 import capture_layers, read_eagle3_config
from tests.caches import empty_cache
from tests.convert.edits import tensors
from tests.eagle3_models import tiny_draft
from tests.engine.scripted import one_device
from tests.models.test_mtp import PAGE, STEPS, T, bound, metadata
from tests.tiny_models import tiny_checkpoint

LAYERS = 5
KEY = "eagle_aux_hidden_state_layer_ids"
# Each option occurs in both of its values with either head. What is captured: hidden_states of transformers, of which
# number i enters layer i. The target is that of the head, or the one that is named: MiniMax-M2, with a Llama head.
CASES = {
    "llama": ("llama", {"prefix": "midlayer.", "draft_vocab_size": 100}, {KEY: [1, 2, 3]}, (2, 3, 4)),
    "minimax-m2": ("minimax-m2", {"draft_vocab_size": 100}, {KEY: [1, 2, 3]}, (2, 3, 4)),
    "llama-own-embedding": ("llama", {"prefix": "layers.0.", "own_embedding": True}, {KEY: [2, 3, 4]}, (2, 3, 4)),
    "mla": ("mla", {"prefix": "layers.0.", "own_head": False}, {"eagle_config": {KEY: [0, 2, 4]}}, (0, 2, 4)),
    "mla-own-embedding": (
        "mla", {"prefix": "midlayer.", "own_embedding": True, "draft_vocab_size": 100},
        {"eagle_config": {KEY: [1, 3]}}, (2, 4),
    ),
    # EAGLE3.1 as the MLA heads of Kimi-K2.6 have it; the same on a Llama layer, with names of older heads.
    "mla-3.1": ("mla", {"prefix": "layers.0."}, {"fc_norm": True, "norm_output": True, KEY: [1, 3]}, (2, 4)),
    "llama-3.1": (
        "llama", {"prefix": "midlayer."}, {"eagle_config": {"norm_output": True}, "use_aux_norm": True, KEY: [2, 3, 4]},
        (2, 3, 4),
    ),
    # Norms before the residual stream, unless the head says otherwise, and what its newer heads have besides.
    "speculators": (
        "llama", {"prefix": "layers.0.", "speculators": True, "own_embedding": True, "draft_vocab_size": 100},
        {"norm_before_fc": True, KEY: [2, 3, 4]}, (2, 3, 4),
    ),
    "speculators-old-residual": (
        "llama", {"prefix": "layers.0.", "speculators": True}, {"norm_before_residual": False, KEY: [2, 3, 4]}, (2, 3, 4)
    ),
}  # fmt: skip


def rms(x, weight, eps):
    import torch

    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate_halves(x, inverse):
    """x [..., T, d] at positions 0 .. T-1, dimension j paired with j + d / 2."""
    import torch

    angles = torch.arange(x.shape[-2])[:, None] * inverse
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def rotate_pairs(x, inverse):
    """As `rotate_halves`, dimension 2j paired with 2j + 1."""
    import torch

    angles = torch.arange(x.shape[-2])[:, None] * inverse
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)


def attend(q, k, v, scale):
    """Causal attention of [N, T, .] heads."""
    import torch

    scores = scale * q @ k.transpose(1, 2)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def llama_attention(w, hf, a):
    import torch

    size, kv = hf["head_dim"], hf["num_key_value_heads"]
    inverse = hf["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    q, k, v = ((a @ w[f"self_attn.{n}_proj.weight"].T).unflatten(1, (-1, size)).transpose(0, 1) for n in "qkv")
    groups = hf["num_attention_heads"] // kv
    k, v = (x.repeat_interleave(groups, dim=0) for x in (rotate_halves(k, inverse), v))
    return attend(rotate_halves(q, inverse), k, v, size**-0.5) @ w["self_attn.o_proj.weight"].T


def yarn_frequencies(hf):
    """arXiv 2309.00071 as DeepSeek applies it: interpolate slow dimensions, keep fast ones, a ramp in between."""
    import torch

    rope, d, base = hf["rope_scaling"], hf["qk_rope_head_dim"], hf["rope_theta"]
    inverse = base ** (-torch.arange(0, d, 2) / d)
    turns = lambda n: (  # noqa: E731 - the dimension that makes n turns over the original context
        d * math.log(rope["original_max_position_embeddings"] / (n * 2 * math.pi)) / (2 * math.log(base))
    )
    low, high = max(math.floor(turns(rope["beta_fast"])), 0), min(math.ceil(turns(rope["beta_slow"])), d - 1)
    ramp = ((torch.arange(d // 2) - low) / (high - low)).clip(0, 1)
    return inverse * (1 - ramp) + inverse / rope["factor"] * ramp


def mla_attention(w, hf, a):
    """Decompressed: no latent is absorbed. The temperature lies in the softmax scale alone: mscale = mscale_all_dim."""
    import torch

    nope, rope, rank, eps = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["kv_lora_rank"], hf["rms_norm_eps"]
    inverse = yarn_frequencies(hf)
    get = lambda name: w[f"self_attn.{name}.weight"]  # noqa: E731
    heads = lambda x: x.unflatten(1, (hf["num_attention_heads"], -1)).transpose(0, 1)  # noqa: E731
    q = heads(rms(a @ get("q_a_proj").T, get("q_a_layernorm"), eps) @ get("q_b_proj").T)
    latent, shared = (a @ get("kv_a_proj_with_mqa").T).split([rank, rope], dim=1)
    kv = heads(rms(latent, get("kv_a_layernorm"), eps) @ get("kv_b_proj").T)
    k_rope = rotate_pairs(shared, inverse).expand(hf["num_attention_heads"], -1, -1)
    q = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:], inverse)], dim=-1)
    k = torch.cat([kv[..., :nope], k_rope], dim=-1)
    mscale = 0.1 * hf["rope_scaling"]["mscale_all_dim"] * math.log(hf["rope_scaling"]["factor"]) + 1
    return attend(q, k, kv[..., nope:], (nope + rope) ** -0.5 * mscale**2) @ get("o_proj").T


def fused(w, hf, captured):
    """What `fc` makes of the captured streams [T, H] each."""
    import torch

    eps, streams = hf["rms_norm_eps"], torch.cat(captured, dim=1)
    if hf.get("norm_before_fc"):
        streams = rms(streams, w["input_norm.weight"], eps)
    chunks = streams.split(hf["hidden_size"], dim=1)
    norms = [f"fc_norm.{i}.weight" for i in range(len(chunks))] if hf.get("fc_norm") else []
    norms = [f"aux_norm_{which}.weight" for which in ("low", "mid", "high")] if hf.get("use_aux_norm") else norms
    if norms:
        streams = torch.cat([rms(chunk, w[name], eps) for chunk, name in zip(chunks, norms, strict=True)], dim=1)
    return streams @ w["fc.weight"].T


def torch_head(w, hf, embedded, x):
    """Residual streams [T, H] of a head over rows of (embedding of the next token, fused hidden state)."""
    import torch
    from torch.nn.functional import silu

    eps = hf["rms_norm_eps"]
    normed_x = rms(x, w["hidden_norm.weight"], eps)
    a = torch.cat([rms(embedded, w["input_layernorm.weight"], eps), normed_x], dim=1)
    residual = normed_x if hf.get("norm_before_residual") else x
    z = residual + (mla_attention if "kv_lora_rank" in hf else llama_attention)(w, hf, a)
    normed = rms(z, w["post_attention_layernorm.weight"], eps)
    gate, up, down = (w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    return z + (silu(normed @ gate) * (normed @ up)) @ down


def torch_drafts(folder, target_folder, captured_ids, ids, steps):
    """What PyTorch reads and says while it drafts, as `torch_nextn`, with the captured streams in front."""
    import torch
    import transformers

    hf = read_hf_config(folder)
    if "speculators_model_type" in hf:
        hf = {"norm_before_residual": True} | hf["transformer_layer_config"] | hf
    hf = hf | hf.get("eagle_config", {})
    target = transformers.AutoModelForCausalLM.from_pretrained(
        target_folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    w = {
        name.removeprefix("midlayer.").removeprefix("layers.0."): torch.from_numpy(value)
        for name, value in tensors(folder).items()
    }
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight)
    head = w.get("lm_head.weight", target.get_output_embeddings().weight)
    with torch.no_grad():
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        captured = [states[i][0, :-1] for i in captured_ids]
        x, embedded = fused(w, hf, captured), embedding[ids[1:]]
        logits, drafted = [], []
        for _ in range(steps + 1):
            y = torch_head(w, hf, embedded, x)
            o = rms(y, w["norm.weight"], hf["rms_norm_eps"])
            found = o[-1] @ head.T
            y = o if hf.get("norm_output") else y
            if "d2t" in w:
                everything = torch.full((hf["vocab_size"],), -math.inf)
                everything[torch.arange(len(found)) + w["d2t"]] = found
                found = everything
            logits.append(found)
            drafted.append(int(found.argmax()))
            rows = embedded, x
            embedded = torch.cat([embedded, embedding[drafted[-1:]]])
            x = torch.cat([x, y[-1:]])  # later steps read the draft's own stream, not normed before EAGLE3.1
    return [c.numpy() for c in captured], *(a.numpy() for a in (*rows, y)), torch.stack(logits).numpy(), drafted


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Target of each head: its Hugging Face folder, and the module converted from it."""
    root, made = tmp_path_factory.mktemp("targets"), {}

    def get(head):
        if head not in made:
            variant = {"llama": "llama", "mla": "moonlight"}.get(head, head)
            folder = tiny_checkpoint(variant, root / variant, num_hidden_layers=LAYERS)
            converted = convert_checkpoint(folder, root / f"{variant}-converted")
            made[head] = folder, bound(*load_params(open_checkpoint(converted), one_device(), "float32"))
        return made[head]

    return get


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_drafts_equal_pytorch(case, targets, tmp_path):
    """Prefilled and token by token, then three draft steps on the head's own output."""
    target_of, options, config, captured_ids = CASES[case]
    target_folder, target = targets(target_of)
    head = "mla" if target_of == "mla" else "llama"
    folder = tiny_draft(tmp_path / "hf", head, **options, **config)
    ids = np.random.default_rng(0).integers(0, 256, T + 1).tolist()
    captured, embedded, x, want, want_logits, drafted = torch_drafts(folder, target_folder, captured_ids, ids, STEPS)
    converted = convert_checkpoint(folder, tmp_path / "out")
    layer_ids = read_eagle3_config(read_hf_config(converted)).layer_ids
    capture = capture_layers(layer_ids, LAYERS)
    assert capture == captured_ids
    model = bound(*load_eagle3(open_checkpoint(converted), one_device(), "float32", capture))
    run = jax.jit(model.__call__)

    features = model.features(jnp.full((T, 64), jnp.nan), tuple(map(jnp.asarray, captured)))
    np.testing.assert_allclose(features, x[:T], atol=2e-4)
    np.testing.assert_array_equal(model.embed_ids(target, jnp.asarray(ids[1:])), embedded[:T])
    prefilled, cache = run(embedded[:T], features, empty_cache(model.cache_spec, 4, PAGE), metadata(0, T, prefill=True))
    np.testing.assert_allclose(prefilled, want[:T], atol=2e-4)
    row = prefilled[-1:]
    for i in range(STEPS + 1):
        logits = model.logits(target, row)[0]
        np.testing.assert_allclose(logits, want_logits[i], atol=2e-4)  # -inf where the head has no such token
        assert int(logits.argmax()) == drafted[i]
        if i < STEPS:
            embedding = model.embed_ids(target, jnp.asarray(drafted[i : i + 1]))
            row, cache = run(embedding, row, cache, metadata(T + i, 1, prefill=False))
            np.testing.assert_allclose(row[0], want[T + i], atol=2e-4)

    cache = empty_cache(model.cache_spec, 4, PAGE)
    for t in range(T + STEPS):
        row, cache = run(embedded[t : t + 1], x[t : t + 1], cache, metadata(t, 1, prefill=False))
        np.testing.assert_allclose(row[0], want[t], atol=2e-4)
