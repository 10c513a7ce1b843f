"""Runs Triton kernels in Triton's interpreter, which must be chosen before triton is imported:

TRITON_INTERPRET=1 python -m tests.kernels.triton_interpreter mla_decode float16   # prints cases' relative errors as JSON
"""

import functools
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from triton.runtime import interpreter

from pallas_kernels import triton_call
from pallas_kernels.gqa_decode import reference as gqa_reference
from pallas_kernels.gqa_decode import triton as gqa_triton
from pallas_kernels.mla_decode import reference as mla_reference
from pallas_kernels.mla_decode import triton as mla_triton
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, SCALE
from pallas_kernels.sliding_window import window_pages
from pallas_kernels.split_kv import make_schedule
from tests.kernels.paged_cases import paged_pool, relative_error, window_bounds
from tests.kernels.triton_cases import CASES, GQA_CASES, Case, GqaCase

_patch_lang_tensor = interpreter._patch_lang_tensor


def patch_lang_tensor(tensor, scope) -> None:
    """Triton 3.6 holds numbers as arrays of one element, which NumPy 2.4 no longer accepts as the bounds of a loop."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_lang_tensor


def interpret(kernel, inputs, outputs, *, grid, constants, aliases=None, **_):
    """Replaces `triton_call.call`. Elements that a kernel does not write stay NaN."""
    inputs = [torch.from_numpy(np.array(a)) for a in inputs]
    results = [torch.from_numpy(np.full(out.shape, np.nan, out.dtype)) for out in outputs]
    for source, target in (aliases or {}).items():
        results[target] = inputs[source]
    kernel[grid](*inputs, *results, **constants)
    return [jnp.asarray(tensor.numpy()) for tensor in results]


def run(kernel, *arrays, **options):
    """A Triton kernel's public function."""
    schedule = jax.jit(make_schedule, static_argnums=(1, 2, 3))
    with mock.patch.object(triton_call, "call", interpret), mock.patch.object(kernel, "make_schedule", schedule):
        name = kernel.__name__.split(".")[1]
        return getattr(kernel, name).__wrapped__(*arrays, **options)  # not jitted: the interpreter needs values


def error(got, want, dtype: str) -> float:
    assert got.shape == want.shape
    assert got.dtype == dtype
    return relative_error(got, want)


def mla_error(case: Case) -> float:
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, case.lengths, CACHED)
    # Large scores, so that a wrong mask shows.
    q = 3 * rng.standard_normal((len(case.lengths), case.n, case.heads, CACHED), np.float32)
    q, latent = jnp.asarray(q, case.dtype), jnp.asarray(pool, case.dtype)
    where = jnp.asarray(tables), jnp.asarray(window_bounds(case.lengths, case.n))
    got = run(mla_triton, q, latent, *where, scale=SCALE, sms=case.sms, capability=case.capability)
    exact = [a.astype(jnp.float32) for a in (q, latent)]
    reference = jax.jit(functools.partial(mla_reference.mla_decode, scale=SCALE, value_dim=LATENT))
    return error(got, reference(*exact, *where), case.dtype)


def gqa_error(case: GqaCase) -> float:
    rng = np.random.default_rng(0)
    K, D = case.key_heads, case.head_dim
    pool, tables = paged_pool(rng, case.lengths, 2 * K * D)
    k, v = (jnp.asarray(part.reshape(-1, 64, K, D), case.dtype) for part in np.split(pool, 2, axis=-1))
    q = 3 * rng.standard_normal((len(case.lengths), case.n, K, case.group, D), np.float32)
    q = jnp.asarray(q, case.dtype)
    where = jnp.asarray(tables), jnp.asarray(window_bounds(case.lengths, case.n))
    if case.window:
        where = window_pages(*where, page_size=64, window=case.window)
    if case.sinks:
        where = *where, jnp.asarray(2 * rng.standard_normal((K, case.group)), jnp.float32)
    options = {"scale": D**-0.5, "window": case.window}
    got = run(gqa_triton, q, k, v, *where, **options, sms=case.sms, capability=case.capability)
    exact = [a.astype(jnp.float32) for a in (q, k, v)]
    reference = jax.jit(functools.partial(gqa_reference.gqa_decode, **options))
    return error(got, reference(*exact, *where), case.dtype)


ERRORS = {
    "mla_decode": lambda name: mla_error(CASES[name]),
    "gqa_decode": lambda name: gqa_error(GQA_CASES[name]),
}

if __name__ == "__main__":
    operation, *names = sys.argv[1:]
    print(json.dumps({name: ERRORS[operation](name) for name in names}))
