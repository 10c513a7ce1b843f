"""The kernels' tuned choices: where they come from, and that the kernels follow them."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe import config as moe
from pallas_kernels.moe.packed_config import configure_packed
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.norm_linear import api as norm_linear
from pallas_kernels.split_kv import make_schedule
from pallas_kernels.tuning import Tuning


def test_the_data_has_known_choices_and_other_devices_get_the_defaults():
    kinds = json.loads(tuning.FILE.read_text())
    assert "NVIDIA H200" in kinds
    for kind, fields in kinds.items():
        assert tuning.of_device(kind) == tuning.from_json(fields)
    assert tuning.of_device("a device of another kind") == Tuning()
    assert tuning.current() == Tuning()
    with pytest.raises(TypeError, match="unknown_choice"):
        tuning.from_json({"unknown_choice": 1})


def test_json_gives_back_what_was_put_in():
    other = Tuning(7, ((3.0, 16),), ((9.0, 24),), 64, 0, True)
    assert tuning.from_json(json.loads(json.dumps(tuning.to_json(other)))) == other


def test_slots_and_pieces():
    H, E, k, inner, shared = LAYERS["moonlight"]
    shape = (E, k, H, inner, shared)
    for T, rows in ((8, moe.ALL_TOKENS_ROWS), (128, 16), (320, 32), (682, 64), (683, moe.WIDEST_ROWS)):
        assert moe.configure(T, *shape).rows == rows
    with tuning.use(dataclasses.replace(Tuning(), slot_rows=((1e9, 64),), most_piece_rows=100)):
        assert moe.configure(128, *shape).rows == 64
        assert moe.configure(100, *shape).pieces == 2
        assert moe.configure(101, *shape).pieces == 0
        assert configure_packed(128, *shape[:4]).rows == 16
    with tuning.use(Tuning(packed_slot_rows=((9.0, 16), (18.0, 24)))):
        for T, rows in ((8, moe.ALL_TOKENS_ROWS), (96, 16), (192, 24), (193, moe.WIDEST_ROWS)):
            assert configure_packed(T, *shape[:4]).rows == rows
        assert moe.configure(192, *shape).rows == 32
    assert moe.configure(128, *shape).pieces == 2


@pytest.mark.parametrize(("overhead", "pieces"), [(0, 8), (1000, 2)])
def test_the_cost_of_a_split(overhead, pieces):
    """A long context beside 14 short ones, 8 blocks at once: three rounds of small pieces, or two of large ones."""
    bounds = jnp.full((15, 1), 64, jnp.int32).at[0].set(64 * 32)
    with tuning.use(Tuning(split_overhead_pages=overhead)):
        items = np.asarray(make_schedule(bounds, 32, 1, 8).items)
    assert ((items[:, 0] == 0) & (items[:, 2] > items[:, 1])).sum() == pieces


def test_the_most_tokens_of_norm_linear(monkeypatch):
    calls = []
    monkeypatch.setattr(norm_linear, "choose", lambda *args: calls.append(args) or "reference")
    x, norm, weights = jnp.ones((2, 16)), jnp.ones(16), (jnp.ones((4, 16)),)
    norm_linear.norm_linear(x, norm, weights, eps=1e-5)
    assert not calls
    with tuning.use(Tuning(norm_linear_tokens=2)):
        norm_linear.norm_linear(x, norm, weights, eps=1e-5)
    assert len(calls) == 1
