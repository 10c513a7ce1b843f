"""EAGLE3 heads against PyTorch written from their formulas, from a checkpoint in the public layout to drafted ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.convert import convert_checkpoint
from jaxspec.loading.checkpoint import load_eagle3, load_params, open_checkpoint
from jaxspec.loading.hf_folder import read_hf_config
from jaxspec.models.eagle3 import capture_layers, read_eagle3_config
from tests.caches import empty_cache
from tests.eagle3_models import tiny_draft
from tests.engine.scripted import one_device
from tests.matrices import members
from tests.models.test_mtp import PAGE, STEPS, T, TorchRows, bound, metadata
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
@pytest.mark.parametrize("case", members(CASES, default=("llama", "mla-3.1", "minimax-m2", "speculators")))
def test_hidden_states_and_drafts_equal_pytorch(case, targets, tmp_path):
    """Prefilled and token by token, then three draft steps on the head's own output."""
    target_of, options, config, captured_ids = CASES[case]
    target_folder, target = targets(target_of)
    head = "mla" if target_of == "mla" else "llama"
    folder = tiny_draft(tmp_path / "hf", head, **options, **config)
    ids = np.random.default_rng(0).integers(0, 256, T + 1).tolist()
    rows = TorchRows(target_folder, folder, ids)
    captured = [rows.residuals[i] for i in captured_ids]
    embedded, x, want, want_logits, drafted = rows.embedded, rows.incoming, rows.outgoing, rows.logits, rows.drafted
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
