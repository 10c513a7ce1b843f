"""Key maps against the models' declarations: every parameter is filled once, completely, and by the right numbers."""

import re

import numpy as np
import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.loading.key_check import check
from jaxspec.loading.safetensors_reader import TensorInfo
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.hf_fields import text_part
from jaxspec.models.keymap import KeyMap, Piece, fill
from jaxspec.models.mtp import NextN
from jaxspec.models.params import declarations
from jaxspec.models.registry import family_of, read_config
from tests.tiny_models import CONFIGS, VARIANTS


def harmless(variant: str) -> re.Pattern[str]:
    config = read_config(text_part(CONFIGS[variant]))
    return family_of(config).harmless(config)


def maps(config: ModelConfig) -> list[tuple[KeyMap, CausalLM | NextN]]:
    out: list[tuple[KeyMap, CausalLM | NextN]] = [(family_of(config).key_map(config), CausalLM(config, np.float32))]
    if config.nextn_layers:
        out.append((family_of(config).nextn_key_map(config), NextN(config, np.float32)))
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_filled_exactly_once(variant: str):
    for key_map_, model in maps(read_config(text_part(CONFIGS[variant]))):
        declared = declarations(model)
        assert key_map_.keys() == declared.keys()
        for path, pieces in key_map_.items():
            count = np.zeros(declared[path].get_value().shape, int)
            for piece in pieces:
                value = piece.of(np.ones(piece.shape))
                assert count[piece.at].shape == value.shape, path
                count[piece.at] += 1
            assert (count == 1).all(), path


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_number_of_a_tensor_is_used_exactly_once(variant: str):
    """Splits keep every value, and permutations are permutations."""
    used: dict[str, np.ndarray] = {}
    for key_map_, _ in maps(read_config(text_part(CONFIGS[variant]))):
        for pieces in key_map_.values():
            for p in pieces:
                counts = used.setdefault(p.name, np.zeros(p.shape, int)).reshape(p.view or p.shape)
                (counts.transpose(p.order) if p.order else counts)[p.take] += 1
    assert all((count == 1).all() for count in used.values())


def test_pieces_are_cast_and_placed():
    """Whole pieces may be read straight into their place, if they have the dtype."""
    pieces = (
        Piece("a", (2, 3), at=0),
        Piece("b", (6,), at=1, view=(2, 3), take=(slice(None), [2, 0, 1])),
        Piece("c", (4,), at=(2, slice(None), slice(0, 2)), view=(2, 2)),
        Piece("d", (2,), at=(2, slice(None), 2)),
    )
    tensors = {"a": np.arange(6).reshape(2, 3), "b": np.arange(6), "c": np.arange(4), "d": np.array([7, 8])}
    straight = []

    def read(name: str, into: np.ndarray | None) -> np.ndarray:
        if into is None or into.dtype != tensors[name].dtype:
            return tensors[name]
        assert into.flags.c_contiguous
        into.reshape(-1)[:] = tensors[name].reshape(-1)
        straight.append(name)
        return into

    for dtype, names in ((np.float32, []), (np.int64, ["a"])):
        out = np.empty((3, 2, 3), dtype)
        for piece in reversed(pieces):
            fill(piece, out, read)
        assert straight == names
        expected = [[[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]], [[0, 1, 7], [2, 3, 8]]]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (4,), (6,)])
def test_a_piece_that_does_not_fit_its_place_is_not_read_into_it(shape: tuple[int, ...]):
    """A reader fills as many bytes as the place has, or reinterprets them: a wrong map must not become wrong weights."""

    def read(_name: str, into: np.ndarray | None) -> np.ndarray:
        return np.zeros(shape, np.int64) if into is None else into

    out = np.full((2, 3), 7)
    for order in ((), tuple(range(len(shape)))):
        with pytest.raises(ValueError, match="broadcast"):
            fill(Piece("w", shape, order=order), out, read)
    assert (out == 7).all()


def info(*shape: int) -> TensorInfo:
    return TensorInfo("F32", shape, None, 0, 0)  # type: ignore[arg-type]


def test_errors_name_tensors_and_shapes():
    keys: KeyMap = {("w",): (Piece("w", (2, 3)),), ("v",): (Piece("v", (4,)),)}
    ignore = harmless("llama")
    good = {"w": info(2, 3), "v": info(4)}
    check([keys], good, ignore)
    check([keys], good | {"model.layers.0.self_attn.rotary_emb.inv_freq": info(8)}, ignore)
    for tensors, message in [
        ({"w": info(2, 3)}, "lacks tensor v$"),
        ({}, r"lacks tensor w \(and 1 more\)"),
        (good | {"w": info(3, 2)}, r"tensor w has shape \[3, 2\]; config.json asks for \[2, 3\]"),
        (good | {"extra": info(1)}, "holds tensor extra, which"),
        (good | {"model.layers.0.self_attn.rotary_emb.inv_freq.x": info(8)}, "inv_freq.x, which"),
    ]:
        with pytest.raises(ModelFormatError, match=message):
            check([keys], tensors, ignore)


def test_harmless_extras_depend_on_the_model():
    plain, mtp = (harmless(v) for v in ("v3", "v3-mtp"))
    tied = harmless("qwen3-tied")
    copies = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    assert all(mtp.fullmatch(n) and not plain.fullmatch(n) for n in copies)
    assert tied.fullmatch("lm_head.weight")
    assert not mtp.fullmatch("lm_head.weight")
    assert not mtp.fullmatch("model.layers.2.embed_tokens.weight")
