"""Compiles an engine's steps from shapes alone: the parameters may still be on their way."""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxspec.config import Settings
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.executables import Executable, ExecutableStore
from jaxspec.engine.handoff import Forwarded, on_devices
from jaxspec.engine.kernel_compiler import kernel_compiler, wait_for
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.scoring import score
from jaxspec.engine.state import StepState
from jaxspec.engine.step import make_parts, make_step
from jaxspec.errors import ConfigError
from jaxspec.models.layers import MOST_MERGED_TOKENS
from jaxspec.models.params import of_ranks, shard_bytes
from pallas_kernels.backend import Backends, UnsupportedError, use

_tracing = threading.Lock()


@contextlib.contextmanager
def tracing(*, while_serving: bool) -> Iterator[None]:
    """For one thread at a time: Python's lock lets no two run, and the more want it, the longer a serving one waits.

    No garbage is collected meanwhile. A trace makes objects by the million and keeps most of them: looking through them takes
    a sixth of its time, and stops every thread. While requests are served, nobody looks through them later either: what
    a trace has left lives as long as the process.
    """
    with _tracing:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if while_serving:
                gc.freeze()
            if collecting:
                gc.enable()


@dataclass(frozen=True)
class Compiler:
    """
    Attributes:
        graphdefs: of the target and of the draft, if there is one.
        params: shapes and shardings of theirs.
        state: shapes and shardings of the donated state.
        layouts: of the packed input of each bucket and part.
        store: where executables are kept, under the names that `key` gives.
        skip_dead: see `make_step`.
        probe: see `Runner`.
        readback: see `make_step`.
        quantised: the target has weights in a scheme.
    """

    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None]
    params: tuple[nnx.State, nnx.State | None]
    state: StepState
    layouts: Mapping[Bucket, InputLayout]
    settings: Settings
    mesh: Mesh
    store: ExecutableStore
    skip_dead: bool
    probe: bool
    readback: bool
    quantised: bool

    def compile(self, bucket: Bucket, may_trace: Callable[[], object] | None = None) -> Executable:
        """The step of a bucket, or the part of one, compiled anew.

        Args:
            may_trace: where requests are served meanwhile: returns when tracing may begin. Nothing else is traced until then.

        Raises:
            ConfigError: it would have to run on plain XLA, which was not asked for.
        """
        step: Any
        if bucket.part == "whole":
            step = make_step(
                self.graphdefs, self.layouts[bucket], self.settings,
                probe=self.probe, skip_dead=self.skip_dead, readback=self.readback,
            )  # fmt: skip
        else:
            both = make_parts(
                self.graphdefs, self.layouts[bucket], self.settings, skip_dead=self.skip_dead, readback=self.readback
            )
            step = both[bucket.part == "choose"]
        size = self.settings.data_parallel_size * self.layouts[bucket].size
        inputs = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=of_ranks(self.mesh))
        structure = jax.tree.structure(self.params)

        def flat_step(leaves: tuple[jax.Array, ...], state: StepState, *rest: Any):
            # Where no parameter is read, shapes stand for them.
            return step(jax.tree.unflatten(structure, leaves or self._leaves), state, *rest)

        def flat_forward(leaves: tuple[jax.Array, ...], state: StepState, inputs: jax.Array, _: Forwarded):
            return flat_step(leaves, state, inputs)

        forward_only = bucket.part == "forward"
        try:
            handed = () if bucket.part == "whole" else (self._forwarded(bucket),)
            leaves = self._leaves if self.reads_parameters(bucket) else ()
            given = (leaves, self.state, *(() if bucket.part == "choose" else (inputs,)), *handed)
            # What the host reads is on every device of its rank, like the inputs.
            out = (self.state, *handed) if forward_only else (self.state, inputs)
            function = on_mesh(flat_forward if forward_only else flat_step, self.mesh, specs(given), specs(out))
            donated, shardings = (1, 3) if forward_only else 1, jax.tree.map(lambda s: s.sharding, out)
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=shardings, keep_unused=forward_only)
            with self._exact(), use(self._backends) as chosen:
                with tracing(while_serving=may_trace is not None):
                    if may_trace is not None:
                        may_trace()
                    lowered = jitted.lower(*given)
                    kernels = kernel_compiler(self._device).begin(lowered) if self.settings.on_gpu else ()
                wait_for(kernels)
                compiled = lowered.compile(self.xla_options(bucket))
        except UnsupportedError as error:
            raise ConfigError(str(error)) from None
        return Executable(compiled, {name: frozenset(ran) for name, ran in chosen.items()})

    def score(self, hidden: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        """What scores a chunk of a prompt from its hidden states [P, H] and the ids that follow [P]: kept, or compiled."""
        structure = jax.tree.structure(self.params)

        def flat_score(leaves: tuple[jax.Array, ...], hidden_PH: jax.Array, following_P: jax.Array) -> jax.Array:
            return score(self.graphdefs[0], jax.tree.unflatten(structure, leaves)[0], hidden_PH, following_P)

        own = of_ranks(self.mesh)
        following = jax.ShapeDtypeStruct(hidden.shape[:1], jnp.int32, sharding=own)
        scored = on_mesh(flat_score, self.mesh, (specs(self._leaves), own.spec, own.spec), own.spec)
        jitted = jax.jit(scored, out_shardings=own)
        with self._exact():
            key = self.store.key("score", self.graphdefs, self._leaves, hidden, self.mesh)
            return self.store.load_or_make(key, lambda: jitted.lower(self._leaves, hidden, following).compile())

    def key(self, what: str, bucket: Bucket) -> str | None:
        """Under which something that follows from a bucket's step is kept; None if it cannot be kept."""
        return self.store.key(what, self._common, bucket, self.xla_options(bucket))

    @functools.cached_property
    def _common(self) -> Any:
        """What the keys of all buckets follow from."""
        return self.store.digest(
            self.graphdefs,
            self._leaves,
            self.state,
            self.settings,
            self.mesh,
            self.probe,
            self.skip_dead,
            self.readback,
        )

    def reads_parameters(self, bucket: Bucket) -> bool:
        """Whether a bucket's step, or part of one, is given the parameters: hundreds of arguments take the host a while."""
        return bucket.part != "choose" or self.graphdefs[1] is not None

    def xla_options(self, bucket: Bucket) -> dict[str, str | bool]:
        """With which XLA compiles a bucket's step, or part of one."""
        one_gpu = self.settings.on_gpu and self.mesh.size == 1
        return xla_options(
            bucket,
            branches=bucket.variant == "full" and self.settings.on_gpu and self.settings.tensor_parallel_size == 1,
            concurrent=one_gpu and (self.quantised or bucket.part == "choose"),
        )

    def handed_bytes(self, bucket: Bucket) -> int:
        """Bytes on each device of what the first part of a step hands to the second, and keeps for its next run."""
        return shard_bytes(jax.tree.leaves(self._forwarded(bucket)))

    def _forwarded(self, bucket: Bucket) -> Forwarded:
        """Shapes of what the first part of a step hands to the second."""
        layout = InputLayout(bucket, self.settings.page_size, self.settings.max_pages)
        forward_part, _ = make_parts(self.graphdefs, layout, self.settings)
        inputs = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        with self._exact(), use(self._backends):
            _, shapes = jax.eval_shape(forward_part, self.params, self.state, inputs)
        return on_devices(shapes, self.mesh)

    @property
    def _device(self) -> jax.Device:
        return self.mesh.local_devices[0]

    @property
    def _leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.tree.leaves(self.params))

    @property
    def _backends(self) -> Backends:
        several_gpus = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "gpu"
        return Backends(self.settings.attention_backend, self.settings.moe_backend, needs_kernels=several_gpus)

    def _exact(self) -> contextlib.AbstractContextManager:
        """float32 is for parity: without this a GPU would round matmul operands to TF32."""
        if self.settings.dtype == "float32":
            return jax.default_matmul_precision("highest")
        return contextlib.nullcontext()


# What XLA records into graphs unless told otherwise, and branches: without them a step that has one would be three graphs.
RECORDED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL"


def xla_options(bucket: Bucket, *, branches: bool, concurrent: bool) -> dict[str, str | bool]:
    """
    Args:
        branches: the step has one for rows that need rules, and one for others.
        concurrent: kernels of a recorded graph that do not wait for each other's results may run at the same time. On one GPU
            only: sums over several wait for kernels of the others.
    """
    # Of matmuls cuBLAS's are at least as fast (steps of 128 to 8320 tokens of Moonlight's shape, H200), and XLA would compile
    # dozens of its own for each to find that out: most of the processor time of a step with prompts.
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
    if bucket.tokens > MOST_MERGED_TOKENS:
        # XLA would merge matmuls with the same input, and copy their weights together in every step. The models merge them
        # themselves where it pays: see `worth_merging`.
        options["xla_gpu_dot_merger_threshold_mb"] = "0"
    if branches:
        options["xla_gpu_enable_command_buffer"] = RECORDED
    if concurrent:
        options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
    return options
