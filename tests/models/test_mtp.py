"""The NextN layer against transformers' MTP class, from a converted checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from convert.reference import TorchModel
from convert.torch_drafts import DraftChoice
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.models import mla
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import rope_tables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.mla import MLASpec
from jaxspec.models.params import Declare
from tests.caches import empty_cache, single_request
from tests.engine.scripted import numpy_params
from tests.tiny_models import tiny_checkpoint

PAGE, T, STEPS = 8, 21, 3


class TorchRows:
    """What PyTorch's draft reads and says over all T + 1 tokens of `ids`, while it drafts STEPS more after the last.

    Attributes:
        residuals: [layers + 1, T, H] of the target.
        embedded, incoming, outgoing: embeddings of the next tokens and hidden states [T + STEPS, H].
        logits, drafted: [STEPS + 1, V] of the rows that draft, and what they draft.
    """

    def __init__(self, target, draft, ids):
        import torch

        model = TorchModel(target, draft=DraftChoice(draft, STEPS + 1))
        run = model.read(ids[:1], ids[1:])
        drafts = run.drafts
        self.residuals, self.logits, self.drafted = run.residuals, drafts.logits[-1], drafts.ids[-1].tolist()
        self.outgoing = np.concatenate([drafts.hidden[:, 0], drafts.hidden[-1, 1:]])
        self.incoming = np.concatenate([drafts.inputs, self.outgoing[T - 1 : -1]])
        self.embedded = model.draft.embed(torch.tensor([*ids[1:], *self.drafted[:STEPS]])).detach().numpy()


def bound(model, params):
    """The module with its parameters in place."""
    graphdef, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def metadata(start: int, count: int, *, prefill: bool) -> StepMetadata:
    return single_request(start, count, pages=3, page_size=PAGE, prefill=prefill)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "v3-mtp",
        "glm4-moe",
        "qwen3.5",
        *(
            pytest.param(v, marks=pytest.mark.full)
            for v in ("glm4-lite", "v32", "glm-dsa", "qwen3.5-moe", "qwen3-next")
        ),
    ],
)
def test_hidden_states_and_drafts_equal_pytorch(variant, tmp_path):
    """Prefilled and token by token, then three draft steps on the layer's own output."""
    folder = tiny_checkpoint(variant, tmp_path / "hf")
    ids = np.random.default_rng(0).integers(0, 256, T + 1).tolist()
    rows = TorchRows(folder, None, ids)
    embedded, hidden, want, want_logits, drafted = (
        rows.embedded, rows.incoming, rows.outgoing, rows.logits, rows.drafted
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    converted = convert_checkpoint(folder, tmp_path / "out")
    target, target_params = load_params(open_checkpoint(converted), mesh, "float32")
    model, params = load_nextn(open_checkpoint(converted), mesh, "float32")
    target, model = bound(target, target_params), bound(model, params)
    run = jax.jit(model.__call__)

    prefilled, cache = run(
        embedded[:T], hidden[:T], empty_cache(model.cache_spec, 4, PAGE), metadata(0, T, prefill=True)
    )
    np.testing.assert_allclose(prefilled, want[:T], atol=2e-4)
    row = prefilled[-1:]
    for i in range(STEPS + 1):
        logits = model.logits(target, row)[0]
        np.testing.assert_allclose(logits, want_logits[i], atol=2e-4)
        assert int(logits.argmax()) == drafted[i]
        if i < STEPS:
            embedding = model.embed_ids(target, jnp.asarray(drafted[i : i + 1]))
            row, cache = run(embedding, row, cache, metadata(T + i, 1, prefill=False))
            np.testing.assert_allclose(row[0], want[T + i], atol=2e-4)

    cache = empty_cache(model.cache_spec, 4, PAGE)
    for t in range(T + STEPS):
        row, cache = run(embedded[t : t + 1], hidden[t : t + 1], cache, metadata(t, 1, prefill=False))
        np.testing.assert_allclose(row[0], want[t], atol=2e-4)


@pytest.mark.parametrize("rank", [16, None])
def test_catch_up_with_joined_projections(rank, monkeypatch):
    """Where one kernel projects queries and keys of all tokens, as where each is a matmul of the tokens that need it."""
    hidden, T = 32, 12
    spec = MLASpec(4, 16, rank, nope_dim=12, rope_dim=8, v_dim=8, softmax_scale=0.2, rope=RopeConfig(8, 1e4))
    attention = spec.build(hidden, Declare(np.dtype("float32")))
    attention = bound(attention, numpy_params(attention, 0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((T, hidden)), jnp.float32)
    meta = metadata(0, T, prefill=True)
    live = LiveRows(jnp.asarray([T - 1, 4]), jnp.repeat(meta.prefill_tables, 2, axis=0), jnp.asarray([T, 5]))
    rope = rope_tables(spec.rope, meta.positions)
    apart = attention.catch_up(x, live, empty_cache(attention.cache_spec, 4, PAGE), meta, rope)
    joined = []

    def project(x, weights):
        joined.append(len(weights))
        return jnp.concatenate([x @ weight.reshape(-1, weight.shape[-1]).T for weight in weights], axis=1)

    monkeypatch.setattr(mla, "joins_linears", lambda *_: True)
    monkeypatch.setattr(mla, "joined_linear", project)
    got = attention.catch_up(x, live, empty_cache(attention.cache_spec, 4, PAGE), meta, rope)
    assert joined == ([1, 1] if rank else [2])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(apart), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-5)
