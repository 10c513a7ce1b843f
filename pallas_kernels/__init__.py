"""Kernels for paged attention, mixtures of experts and sampling: one folder per operation.

Each folder has `api.py` (the public function: shapes, dtypes, errors) and `reference.py` (plain XLA, the oracle of every
other implementation), and `mosaic.py` or `triton.py` where it has such kernels. The files beside this one are shared:

- `backend.py` chooses implementations, `tuning.py` holds measured choices, `compat.py` bridges versions of jax;
- `split_kv.py` and `triton_split_kv.py` split long contexts over thread blocks, `query_tiles.py` cuts prompt tokens;
- `reference_attention.py` and `mosaic_attention.py` are parts of attention, `rotary.py` and `matvec.py` parts of kernels;
- `triton_call.py` runs Triton kernels.
"""

from pallas_kernels.compat import ask_ptxas_once, lower_kernels_once, name_kernels_without_numbers

ask_ptxas_once()
lower_kernels_once()
name_kernels_without_numbers()
