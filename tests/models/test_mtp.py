"""The NextN layer against transformers' MTP class, from a converted checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.models.metadata import StepMetadata
from tests.caches import empty_cache, single_request
from tests.tiny_models import tiny_checkpoint

PAGE, T, STEPS = 8, 21, 3


def torch_nextn(folder, ids, steps):
    """What PyTorch's layer reads and says while it drafts `steps` more tokens after those of `ids`.

    Every step runs over all rows anew: nothing is cached. Returns embeddings of the next tokens, incoming and outgoing
    hidden states [T + steps, H], logits [steps + 1, V] of the rows that draft, and what they draft.
    """
    import torch
    import transformers
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_layers import MtpModel

    config = transformers.AutoConfig.from_pretrained(folder)
    config.mtp_layer_types, config.mtp_mlp_layer_types = ["indexed_attention"], ["sparse"]
    config.num_mtp_layers = 1
    target = (
        getattr(transformers, config.architectures[0])
        .from_pretrained(
            folder, config=config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
        .eval()
    )
    layer = MtpModel(target, 1).eval().layers[0]
    reader = SafetensorsReader(folder)
    prefix = f"model.layers.{target.config.num_hidden_layers}."
    source = {
        name.removeprefix(prefix): torch.from_numpy(np.array(reader.read(name), np.float32))
        for name in reader.tensors
        if name.startswith(prefix)
    }
    state = {}
    experts = target.config.n_routed_experts
    for name in layer.state_dict():
        hub = name.removeprefix("mtp_block.")
        hub = "shared_head.norm.weight" if hub == "post_norm.weight" else hub
        if hub.endswith("experts.gate_up_proj"):
            part = hub.removesuffix("gate_up_proj")
            rows = [[source[f"{part}{e}.{k}_proj.weight"] for k in ("gate", "up")] for e in range(experts)]
            state[name] = torch.stack([torch.cat(pair) for pair in rows])
        elif hub.endswith("experts.down_proj"):
            part = hub.removesuffix("down_proj")
            state[name] = torch.stack([source[f"{part}{e}.down_proj.weight"] for e in range(experts)])
        else:
            state[name] = source[hub]
    layer.load_state_dict(state)
    with torch.no_grad():
        hidden = target.model(torch.tensor([ids])).last_hidden_state[:, :-1]
        embedded = target.model.embed_tokens(torch.tensor([ids[1:]]))
        logits, drafted = [], []
        for _ in range(steps + 1):
            positions = torch.arange(hidden.shape[1])[None]
            x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
            mask = create_causal_mask(
                config=target.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions
            )
            out = layer.mtp_block(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=target.model.rotary_emb(x, positions),
            )
            draft = layer.post_norm(out[0] if isinstance(out, tuple) else out)
            logits.append(target.lm_head(draft[0, -1]))
            drafted.append(int(logits[-1].argmax()))
            # The next step reads the drafted token and this one's hidden state, after the layer's final norm.
            rows = embedded, hidden
            embedded = torch.cat([embedded, target.model.embed_tokens(torch.tensor([drafted[-1:]]))], dim=1)
            hidden = torch.cat([hidden, draft[:, -1:]], dim=1)
    return *(a[0].numpy() for a in (*rows, draft)), torch.stack(logits).numpy(), drafted


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
    ["v3-mtp", "glm4-moe", *(pytest.param(v, marks=pytest.mark.full) for v in ("glm4-lite", "v32", "glm-dsa"))],
)
def test_hidden_states_and_drafts_equal_pytorch(variant, tmp_path):
    """Prefilled and token by token, then three draft steps on the layer's own output."""
    folder = tiny_checkpoint(variant, tmp_path / "hf")
    ids = np.random.default_rng(0).integers(0, 256, T + 1).tolist()
    embedded, hidden, want, want_logits, drafted = torch_nextn(folder, ids, STEPS)
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
