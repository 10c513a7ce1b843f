"""Drafts cut to frequent tokens: the logits of the whole draft where it may propose, and errors that name the file."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.loading.checkpoint import load_eagle3, open_checkpoint
from jaxspec.loading.draft_vocabulary import read_frequent, reduce_loaded
from jaxspec.models.mtp import NextN
from jaxspec.models.params import count_parameters
from jaxspec.models.registry import read_config
from tests.eagle3_models import VOCAB, H, tiny_draft
from tests.engine.scripted import numpy_params, one_device
from tests.models.test_mtp import bound
from tests.tiny_models import CONFIGS

IDS = np.array([3, 50, 51, 200], np.int32)


class Target:
    """A checkpoint of which only the head is read, and the model that it makes."""

    def __init__(self, config):
        self.scale = config.logit_scale
        rng = np.random.default_rng(1)
        self.weight = rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)
        self.read = []

    def read_parts(self, targets):
        for part, shapes in targets.items():
            self.read.append(part)
            yield part, {path: self.weight if path[1] == "weight" else np.ones(s.shape) for path, s in shapes.items()}

    def logits(self, hidden):
        return self.scale * hidden @ self.weight.T


def check(draft, params, variant, ids=IDS, *, part=None):
    """Logits of kept tokens are the whole draft's, all others are impossible; returns those that are kept."""
    config = replace(read_config(CONFIGS[variant]), logit_scale=0.5)
    target = Target(config)
    hidden = jnp.asarray(np.random.default_rng(2).standard_normal((5, config.hidden_size)), jnp.float32)
    whole = np.asarray(bound(draft, params).logits(target, hidden))
    reduced, reduced_params = reduce_loaded(draft, params, ids, target, config, one_device(), "float32")
    assert target.read == ([] if part is None else [part])
    got = np.asarray(bound(reduced, reduced_params).logits(None, hidden))
    kept = np.flatnonzero(np.isfinite(got[0]))
    np.testing.assert_allclose(got[:, kept], whole[:, kept], atol=1e-5)
    assert (got[:, np.setdiff1d(np.arange(config.vocab_size), kept)] == -np.inf).all()
    assert count_parameters(reduced) < count_parameters(draft) + len(ids) * (config.hidden_size + 1) + 1
    return kept.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "part"),
    [({}, None), ({"draft_vocab_size": 100}, None), ({"own_head": False}, "head"), ({"own_embedding": True}, None)],
)
def test_an_eagle3_head_keeps_its_rows(options, part, tmp_path):
    folder = tiny_draft(tmp_path, **options)
    draft, params = load_eagle3(open_checkpoint(folder), one_device(), "float32", (0, 1, 2))
    kept = check(draft, params, "llama", np.arange(0, VOCAB, 5, dtype=np.int32), part=part)
    own = np.arange(100) + np.asarray(params["d2t"]) if "draft_vocab_size" in options else np.arange(VOCAB)
    assert kept == [i for i in range(0, VOCAB, 5) if i in own]
    assert len(kept) > 10


def test_a_map_of_any_order_keeps_the_right_rows(tmp_path):
    """A draft's own ids need not ascend."""
    folder = tiny_draft(tmp_path, draft_vocab_size=100)
    draft, params = load_eagle3(open_checkpoint(folder), one_device(), "float32", (0, 1, 2))
    own, order = np.arange(100) + np.asarray(params["d2t"]), np.random.default_rng(3).permutation(100)
    params |= {"d2t": own[order] - np.arange(100), "head": {"weight": params["head"]["weight"][order]}}
    assert check(draft, params, "llama", np.sort(own[:40]).astype(np.int32)) == np.sort(own[:40]).tolist()


def test_a_target_without_a_head_lends_its_embedding(tmp_path):
    folder = tiny_draft(tmp_path, own_head=False)
    draft, params = load_eagle3(open_checkpoint(folder), one_device(), "float32", (0, 1, 2))
    assert check(draft, params, "qwen3-tied", part="embed") == IDS.tolist()


def test_an_eagle3_head_that_has_none_of_them(tmp_path):
    draft, params = load_eagle3(
        open_checkpoint(tiny_draft(tmp_path, draft_vocab_size=100)), one_device(), "float32", (0, 1, 2)
    )
    others = np.setdiff1d(np.arange(VOCAB), np.arange(100) + np.asarray(params["d2t"])).astype(np.int32)
    with pytest.raises(ConfigError, match="names none of the tokens that the draft can propose"):
        check(draft, params, "llama", others)


@pytest.mark.parametrize("variant", ["v3-mtp"])
def test_a_nextn_layer_has_rows_of_its_targets_head(variant):
    draft = NextN(read_config(CONFIGS[variant]), np.dtype(np.float32))
    assert check(draft, numpy_params(draft, 4), variant, part="head") == IDS.tolist()


@pytest.mark.parametrize(
    ("content", "most", "ids"),
    [
        ([9, 2, 5, 2], None, [2, 5, 9]),
        ([9, 2, 5, 2], 2, [2, 9]),
        ({"7": 1, "3": 10, "1": 0, "4": 10}, 2, [3, 4]),
        ({"7": 1.5, "3": 10, "1": 0}, None, [3, 7]),
    ],
)
def test_what_is_frequent(content, most, ids, tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps(content))
    assert read_frequent(str(file), most, H).tolist() == ids


@pytest.mark.parametrize(
    ("content", "most", "message"),
    [
        (None, None, "cannot read speculative_token_map"),
        ("[1", None, "cannot read speculative_token_map"),
        ("[]", None, "must be JSON: a list of token ids"),
        ("3", None, "must be JSON: a list of token ids"),
        ("[true]", None, "names True, which is no id"),
        ("[1, 64]", None, "names 64, which is no id of a vocabulary of 64"),
        ('{"x": 1}', None, "must map token ids to counts"),
        ('{"1": [1]}', None, "must map token ids to counts"),
        ("[1, 2]", 3, r"speculative_vocab_size \(.*\) 3 is more than the 2 ids"),
    ],
)
def test_files_of_no_use(content, most, message, tmp_path):
    file = tmp_path / "map.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_frequent(str(file), most, 64)
    assert "\n" not in str(error.value)
