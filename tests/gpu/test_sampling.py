"""The sampling kernels on the GPU, at a model's vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import api, mosaic, reference
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.sampling_cases import draws, logits_of, temperatures_of

pytestmark = pytest.mark.gpu

SIZES = (1024, *VOCABULARIES.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("R", [6, 130])
def test_stats(R, V, dtype):
    logits, temperature = logits_of(R, V, dtype), temperatures_of(R)
    assert mosaic.unsupported_reason(logits) is None
    got, want = jax.jit(api.logits_stats)(logits, temperature), jax.jit(reference.logits_stats)(logits, temperature)
    np.testing.assert_array_equal(got.finite, want.finite)
    sound = np.ones(R, bool)
    sound[[4, 5]] = False  # a row with NaN has no maximum, one with infinity no sum
    for name in ("argmax", "log_z", "log_z_tempered"):
        np.testing.assert_allclose(
            np.asarray(getattr(got, name))[sound], np.asarray(getattr(want, name))[sound], rtol=1e-5, err_msg=name
        )
    assert ((np.asarray(got.argmax) >= 0) & (np.asarray(got.argmax) < V)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("residual", [False, True])
def test_draws(V, dtype, residual):
    case = draws(V, dtype, residual=residual)
    got, want = jax.jit(api.gumbel_argmax)(*case), jax.jit(reference.gumbel_argmax)(*case)
    wanted = np.asarray(case[4])
    np.testing.assert_array_equal(np.asarray(got)[wanted], np.asarray(want)[wanted])
