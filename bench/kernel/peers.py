"""The kernels that `bench kernel mla_decode` has to beat, called through PyTorch on the same arrays as ours.

FlashMLA and FlashAttention-3 come from the binaries in vLLM 0.24.0's wheel, loaded without importing vLLM. Each case is
recorded as one CUDA graph of as many calls as ours makes, with the schedules computed beforehand.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bench.kernel.mla import MlaDecode
from jaxspec.config import PAGE_SIZE
from jaxspec.errors import JaxspecError
from pallas_kernels.mla_decode.shapes import LATENT, ROPE, SCALE

LIBRARIES = {"flashmla": "vllm/_flashmla_C.abi3.so", "fa3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"}
# vLLM lets FA3 choose (0), or bounds the splits by 32 where it records graphs.
FA3_SPLITS = (0, 32)


class PeerError(JaxspecError):
    """A peer's kernels cannot be loaded."""


class Graph:
    """A recorded graph of one call for each query array; `outputs` are those of its latest launch."""

    def __init__(self, torch: Any, call: Any, queries: Sequence[Any]):
        self._torch = torch
        # A recorded graph reads its inputs, the schedule inside `call` too, at their old addresses, and keeps none alive.
        self._inputs = (call, queries)
        self.calls = len(queries)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(queries[0])
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # jax's threads may allocate meanwhile: only calls of this thread may invalidate the recording.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = [call(q) for q in queries]
        self.launch(3)

    def launch(self, launches: int) -> None:
        for _ in range(launches):
            self._graph.replay()
        self._torch.cuda.synchronize()

    def time(self, launches: int) -> float:
        """Device time of one call in seconds, gaps between kernels included."""
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(launches):
            self._graph.replay()
        stop.record()
        stop.synchronize()
        return 1e-3 * start.elapsed_time(stop) / (launches * self.calls)


class Peers:
    """The chosen peers, loaded. Errors name --peer-libs."""

    def __init__(self, names: Sequence[str], folder: Path | None):
        self.names = tuple(names)
        if not names:
            return
        if folder is None:
            raise PeerError(
                f"--peers {','.join(names)} needs --peer-libs FOLDER, a site-packages folder with vLLM 0.24.0"
            )
        files = {name: folder / LIBRARIES[name] for name in names}
        if missing := [str(file) for file in files.values() if not file.is_file()]:
            raise PeerError(
                f"--peer-libs {folder} lacks {', '.join(missing)}: name a site-packages folder with vLLM 0.24.0"
            )
        try:
            self._torch = importlib.import_module("torch")
            for file in files.values():
                self._torch.ops.load_library(str(file.resolve()))
        except (ImportError, OSError) as e:
            why = e.__cause__ or e
            raise PeerError(
                f"the kernels under --peer-libs {folder} cannot be loaded (torch 2.11, CUDA 13): {why}"
            ) from e

    def record(self, name: str, case: MlaDecode, inputs: Any) -> dict[str, Graph]:
        """Graphs of one peer over our inputs, by a name for each of its variants."""
        torch = self._torch
        jax.block_until_ready(inputs)
        qs, cache, tables, _ = jax.tree.map(torch.from_dlpack, inputs)
        lengths = torch.full((case.B,), case.S, dtype=torch.int32, device="cuda")
        if name == "flashmla":
            return {"flashmla": Graph(torch, self.flashmla(qs[0], cache, tables, lengths), qs)}
        # Two arrays, as the projections leave them.
        flat = [q.reshape(case.B * case.Q, case.H, -1) for q in qs]
        split = [(q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()) for q in flat]
        return {f"fa3_{n}": Graph(torch, self.fa3(case, cache, tables, lengths, n), split) for n in FA3_SPLITS}

    def flashmla(self, q: Any, cache: Any, tables: Any, lengths: Any) -> Any:
        forward = self._torch.ops._flashmla_C.dense_decode_fwd
        keys = cache.unsqueeze(2)
        *_, schedule, splits = forward(q, keys, LATENT, lengths, tables, SCALE, True, None, None, None)
        return lambda q: forward(q, keys, LATENT, lengths, tables, SCALE, True, schedule, splits, None)[0]

    def fa3(self, case: MlaDecode, cache: Any, tables: Any, lengths: Any, splits: int) -> Any:
        torch = self._torch
        keys, values = cache[..., LATENT:].unsqueeze(2), cache[..., :LATENT].unsqueeze(2)
        starts = torch.arange(0, case.B * case.Q + 1, case.Q, dtype=torch.int32, device=lengths.device)
        schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            batch_size=case.B, max_seqlen_q=case.Q, max_seqlen_k=case.S, num_heads=case.H, num_heads_k=1,
            headdim=ROPE, headdim_v=LATENT, qkv_dtype=torch.bfloat16, seqused_k=lengths, cu_seqlens_q=starts,
            cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None, page_size=PAGE_SIZE,
            max_seqlen_k_new=0, is_causal=True, window_size_left=-1, window_size_right=-1, has_softcap=False,
            num_splits=splits, pack_gqa=None, sm_margin=0,
        )  # fmt: skip

        def call(q: Any) -> Any:
            nope, rope = q
            out = torch.ops._vllm_fa3_C.fwd(
                q=rope, k=keys, v=values, k_new=None, v_new=None, q_v=nope, out=None, cu_seqlens_q=starts,
                cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=lengths, max_seqlen_q=case.Q,
                max_seqlen_k=case.S, page_table=tables, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
                rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
                softmax_scale=SCALE, is_causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
                is_rotary_interleaved=True, scheduler_metadata=schedule, num_splits=splits, pack_gqa=None, sm_margin=0,
                s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
            )  # fmt: skip
            return out[0].view(case.B, case.Q, case.H, LATENT)

        return call

    def error(self, results: Sequence[Any], others: Sequence[Any]) -> float:
        """The largest relative error of any output vector; NaN if an output has one."""
        torch = self._torch
        worst = []
        for ours, theirs in zip(results, others, strict=True):
            a, b = (x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in (ours, theirs))
            worst.append(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max())
        return float(torch.stack(worst).max())

    def release(self) -> None:
        """Gives the memory of dropped graphs back to the device, where jax may need it."""
        if self.names:
            self._torch.cuda.empty_cache()
