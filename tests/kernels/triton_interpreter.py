"""Runs the Triton kernels of mla_decode in Triton's interpreter, which has to be chosen before triton is imported:

TRITON_INTERPRET=1 python -m tests.kernels.triton_interpreter   # prints the relative error of each case as JSON
"""

import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from triton.runtime import interpreter

from pallas_kernels import triton_call
from pallas_kernels.mla_decode import reference, triton
from pallas_kernels.split_kv import make_schedule
from tests.kernels.paged_cases import paged_pool, relative_error, window_bounds
from tests.kernels.triton_cases import CASES, Case

SCALE = 192**-0.5
_patch_lang_tensor = interpreter._patch_lang_tensor


def patch_lang_tensor(tensor, scope) -> None:
    """Triton 3.6 holds numbers as arrays of one element, which NumPy 2.4 no longer takes for the bounds of a loop."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_lang_tensor


def interpret(kernel, inputs, outputs, *, grid, constants, aliases=None, **_):
    """In place of `triton_call.call`. What a kernel does not write stays NaN."""
    inputs = [torch.from_numpy(np.array(a)) for a in inputs]
    results = [torch.from_numpy(np.full(out.shape, np.nan, out.dtype)) for out in outputs]
    for source, target in (aliases or {}).items():
        results[target] = inputs[source]
    kernel[grid](*inputs, *results, **constants)
    return [jnp.asarray(tensor.numpy()) for tensor in results]


def error(case: Case) -> float:
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, case.lengths, 576)
    # Scores of some size, so that a wrong mask shows.
    q = 3 * rng.standard_normal((len(case.lengths), case.n, case.heads, 576), np.float32)
    q, latent = jnp.asarray(q, case.dtype), jnp.asarray(pool, case.dtype)
    tables, bounds = jnp.asarray(tables), jnp.asarray(window_bounds(case.lengths, case.n))
    run = triton.mla_decode.__wrapped__  # not jitted: the interpreter needs values
    schedule = jax.jit(make_schedule, static_argnums=(1, 2, 3))
    with mock.patch.object(triton_call, "call", interpret), mock.patch.object(triton, "make_schedule", schedule):
        got = run(q, latent, tables, bounds, scale=SCALE, sms=case.sms, capability=case.capability)
    exact = [a.astype(jnp.float32) for a in (q, latent)]
    want = jax.jit(functools.partial(reference.mla_decode, scale=SCALE, value_dim=512))(*exact, tables, bounds)
    assert got.shape == want.shape
    assert got.dtype == q.dtype
    return relative_error(got, want)


if __name__ == "__main__":
    print(json.dumps({name: error(case) for name, case in CASES.items()}))
