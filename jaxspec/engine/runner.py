"""Runs steps on the device: compiles every bucket ahead of time, dispatches plans, reads their outputs in order."""

import collections
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.compile_cache import FileStore
from jaxspec.config import Settings
from jaxspec.engine.addresses import leave_gaps
from jaxspec.engine.batch import InputLayout, bucket_for
from jaxspec.engine.buckets import Bucket, bucket_table, parts, split_table
from jaxspec.engine.compile_process import compile_beside
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.counts import CountUpload
from jaxspec.engine.executables import Executable, ExecutableStore
from jaxspec.engine.expert_load import ExpertLoad
from jaxspec.engine.follower import Follower
from jaxspec.engine.launcher import Launcher
from jaxspec.engine.leader import Leader
from jaxspec.engine.masks import Masked, MaskUpload
from jaxspec.engine.orders import Kind, Order
from jaxspec.engine.plan import PrefillRow, StepPlan
from jaxspec.engine.scoring import following_ids, unpack, wants_scores
from jaxspec.engine.state import StepState, compile_zeros, state_shapes
from jaxspec.engine.state_copies import StateCopies
from jaxspec.engine.step import StepArrays, packed_columns, top_columns
from jaxspec.engine.step_output import StepOutput
from jaxspec.engine.warmup import Preparation, first_buckets, naming_what_does_not_fit
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.params import num_ranks, of_ranks, schemes_of
from jaxspec.progress import Progress
from jaxspec.sampling.params import MAX_LOGPROBS
from pallas_kernels.peer_sum.mailbox import open_mailboxes
from pallas_kernels.readback import api as readback
from pallas_kernels.readback.host_memory import Entry, HostMemory

# A CUDA graph is recorded after an executable's first run, and replayed from the third on.
WARMUP_RUNS = 3
# Steps that may be dispatched and not read, where their output takes no more memory than this, in bytes: benchmarks let more
# run ahead than an engine does.
MOST_UNREAD, MOST_OUTPUT_BYTES = 64, 16 << 20


class _Dispatched:
    """A step that runs.

    Attributes:
        arrays: its outputs, on their way to the host.
        wants_top: a row wants the likeliest ids, which most plans never copy.
        entry: where it writes its output, if it does.
    """

    def __init__(self, plan: StepPlan, bucket: Bucket, arrays: StepArrays, entry: Entry | None):
        self.plan, self.bucket, self.arrays, self.entry = plan, bucket, arrays, entry
        self.wants_top = any(request.params.logprobs for request in plan.requests)
        self.scores: jax.Array | None = None
        if arrays.packed is not None:
            arrays.packed.copy_to_host_async()
        if self.wants_top and arrays.top is not None:
            arrays.top.copy_to_host_async()


@dataclass(frozen=True)
class _Begun:
    """A split step whose forward pass runs."""

    plan: StepPlan
    bucket: Bucket
    inputs: np.ndarray
    entry: Entry | None


def bind(module: Any, params: dict) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's structure, and its state filled with a nested dict of arrays, or of shapes: split once, for good."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return graphdef, state


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


class Runner:
    """Holds the parameters, the donated state and the compiled steps.

    After `warm_up` it only calls compiled executables and copies arrays: the serving path never compiles.

    Attributes:
        graphdefs, params: of the target and of the draft, as `bind` made them; `use_params` exchanges the latter.
        layouts: of each bucket's packed input.
        compiler: gets their steps. launcher: launches all that runs.
        kernels: what the compiled steps run, operation -> implementations; they may differ from bucket to bucket.
        bucket_seconds: what a step in each bucket takes, where it was measured: plans run in the cheapest.
        ready: the buckets that have their step, in the table's order.
        split: the buckets whose step may also run in two parts. split_ready: those for which both are there.
        mailboxes: of the devices, by axis of the mesh. Steps know their addresses only, so they live as long as the runner.
        expert_load: as of the newest step that was read; None where it is not counted.

    Args:
        params: nested dict of the model's parameters on `mesh`, or of their shapes and shardings: then `use_params` brings them
            before `warm_up`.
        draft: the model that proposes tokens, and its parameters, where the settings ask for one.
        buckets: those to compile (default: the table of the settings).
        split: those of them whose step is compiled in two parts also (default: `split_table`, if `buckets` is).
        skip_dead: see `make_step`.
        probe: also return a `Probe` of every token (slower).
        files: where compiled steps stay for later starts; None: nowhere.
        group: of processes that share the mesh. Those of rank 0 run as one alone does, the others `follow`.
        compile_ahead: threads get the executables of the `first_buckets` while the state takes its memory and the parameters
            are on their way, and those others that an earlier start compiled; `warm_up` waits for them. Only on a GPU: a CPU
            has no cores to spare.
    """

    def __init__(
        self,
        model: CausalLM,
        params: dict,
        settings: Settings,
        mesh: Mesh,
        *,
        draft: tuple[Draft, dict] | None = None,
        buckets: tuple[Bucket, ...] | None = None,
        split: tuple[Bucket, ...] | None = None,
        skip_dead: bool = True,
        probe: bool = False,
        files: FileStore | None = None,
        group: Leader | Follower | None = None,
        compile_ahead: bool = False,
    ):
        assert settings.model_drafts == (draft is not None)
        assert settings.data_parallel_size == num_ranks(mesh)
        assert not (probe and settings.data_parallel_size > 1), "see `build_engine`"
        specs = model.cache_specs()
        paged = all(spec.paged for spec in specs)
        assert paged or settings.state_snapshots or not settings.prefix_caching, "see `resolve`"
        assert all(spec.rejects for spec in specs) or settings.window == 1, "see `resolve`"
        self.settings = settings
        self.window = settings.window
        self.buckets = buckets or bucket_table(settings)
        if split is None:
            split = () if buckets or probe else split_table(settings)
        self.split = split
        target_def, target = bind(model, params)
        draft_def, drafter = bind(*draft) if draft else (None, None)
        self.graphdefs = (target_def, draft_def)
        self._mesh = mesh
        self._group = group
        self.store = ExecutableStore(files, mesh)
        shapes = state_shapes(model, settings, mesh, draft=draft[0] if draft else None)
        zeros = self.store.load_or_make(self.store.key("zeros", shapes), lambda: compile_zeros(shapes))
        shapes_of = {b: InputLayout(b, settings.page_size, settings.max_pages) for b in (*self.buckets, *split)}
        self.layouts = shapes_of | {part: shapes_of[b] for b in split for part in parts(b)}
        # One process alone reads what its devices write.
        self._host_memory = None if probe or group is not None or not readback.is_used() else self._memory_for_output()
        self.compiler = Compiler(
            self.graphdefs, jax.tree.map(_shape_of, (target, drafter)), shapes, self.layouts, settings, mesh,
            store=self.store, skip_dead=skip_dead, probe=probe, readback=self._host_memory is not None,
            quantised=bool(schemes_of(model)),
        )  # fmt: skip
        self.ready: tuple[Bucket, ...] = ()
        self.split_ready: tuple[Bucket, ...] = ()
        self._late: tuple[Bucket, ...] = ()
        # How lies what the host brings and reads.
        self._of_ranks = of_ranks(mesh)
        self.expert_load = ExpertLoad.zero(model, mesh.size) if settings.expert_load_metrics else None
        self._upload = MaskUpload(Masked(shapes.masks, shapes.held), mesh)
        self._count = CountUpload(shapes.counts, settings.max_model_len, mesh)
        most = max(bucket.prefill_rows for bucket in self.buckets)
        self._copies = StateCopies(shapes, specs, draft[0].cache_spec if draft else None, most, mesh)
        beside = functools.partial(compile_beside, self.compiler) if settings.on_gpu and not group and files else None
        self._preparation = Preparation(self._load, self.compiler.compile, self._save, beside)
        if compile_ahead:
            self._compile_ahead()
        try:
            with naming_what_does_not_fit(settings):
                state = zeros()
                self.mailboxes = {axis: open_mailboxes(mesh, axis) for axis in shapes.mailboxes}
                if self.mailboxes:
                    state = state._replace(mailboxes={axis: each.addresses for axis, each in self.mailboxes.items()})
        except BaseException:
            self.stop()
            raise
        self.launcher = Launcher(
            self.executables, state, self._upload, self._count, self._copies, self.compiler.reads_parameters
        )
        self.use_params((target, drafter))
        self._queue: collections.deque[_Dispatched] = collections.deque()
        self._begun: _Begun | None = None
        self.kernels: dict[str, set[str]] = {}
        self.bucket_seconds: Mapping[Bucket, float] = {}
        self._between_gaps: tuple[jax.Array, ...] = ()

    def use_params(self, params: tuple[nnx.State, nnx.State | None]) -> None:
        """Steps run with these from now on: those of the target and of the draft, as `bind` made them."""
        self.params = params
        # Flattened once: modules' state is flattened in Python, which takes a fifth of a small decode step.
        self.launcher.leaves = tuple(jax.tree.leaves(params))

    @property
    def state(self) -> StepState:
        """On the devices; each step takes it and gives another."""
        return self.launcher.state

    @state.setter
    def state(self, state: StepState) -> None:
        self.launcher.state = state

    @property
    def executables(self) -> tuple[Bucket, ...]:
        """The buckets, then the parts of those whose step exists in two."""
        return (*self.buckets, *(part for bucket in self.split for part in parts(bucket)))

    @property
    def in_flight(self) -> int:
        """Steps dispatched but not read, one that has yet to choose included."""
        return len(self._queue) + (self._begun is not None)

    @property
    def begun(self) -> StepPlan | None:
        """The split step, newest of those in flight, whose rows have yet to choose."""
        return None if self._begun is None else self._begun.plan

    @property
    def num_kept(self) -> int:
        """Executables that `warm_up` found compiled by an earlier start."""
        return self._preparation.num_kept

    @property
    def num_pending(self) -> int:
        """Buckets that do not serve yet; larger ones do in their place."""
        return self._preparation.num_pending

    def _compile_ahead(self) -> None:
        first = first_buckets(self.buckets)
        others = [bucket for bucket in self.executables if bucket not in first]
        self.compiler.key("step", first[0])  # what all keys have in common is described here, once, not by each thread
        # Where drafts adapt, what steps cost is measured first.
        self._preparation.begin_beside(() if self.settings.adaptive_drafts else others)
        self._preparation.begin(first)

    def warm_up(
        self, progress: Progress | None = None, *, announce: Progress | None = None, wait_for_all: bool = True
    ) -> None:
        """Gets the executable of every bucket and runs each on padding alone, which touches page 0 and slot 0 only.

        Buckets compile in parallel threads; they run one at a time, because they share the donated state.

        Args:
            progress: called when a bucket is ready.
            announce: called before a bucket compiles: the how manieth of how many it is, and which one, in words. Never
                at the same time as `progress`.
            wait_for_all: False: on a GPU only the `first_buckets` are ready then, kept or not; the rest follow after `go_on`.
                Their first runs are `install_prepared`'s, or steps of requests that never pause.
                (A CPU has few buckets, and no cores to spare.)

        Raises:
            ConfigError: the steps do not fit in memory.
        """
        with naming_what_does_not_fit(self.settings):
            self._warm_up(progress, announce, wait_for_all)

    def _warm_up(self, progress: Progress | None, announce: Progress | None, wait_for_all: bool) -> None:
        if self.settings.on_gpu:  # not before the parameters are there: they would fill the gaps
            self._between_gaps = leave_gaps(self.layouts.values(), self._of_ranks)
        masked = self._upload.warm_up(Masked(self.state.masks, self.state.held), self.store)
        counts = self._count.warm_up(self.state.counts, self.store)
        self.state = self.state._replace(counts=counts, **masked._asdict())
        if self.settings.state_snapshots:
            self.state = self._copies.warm_up(self.state, self.store)
        every = self.executables
        all_first = wait_for_all or self._group or not self.settings.on_gpu
        first = every if all_first else first_buckets(self.buckets)
        self._late = tuple(bucket for bucket in every if bucket not in first)

        def use(bucket: Bucket, executable: Executable) -> None:
            self._install(bucket, executable)
            if self._group is None:
                self._prepare_score(bucket)
                self._try_out(bucket)

        self._preparation.run(first, use, progress, announce)
        self.store.flush()
        if self._group is not None:
            self._meet(self._group)
        if not self._late:
            self._preparation.save()

    def stop(self) -> None:
        """Nothing more is prepared; see `Preparation.stop`."""
        self._preparation.stop()

    def go_on(self) -> None:
        """Threads prepare from now on what `warm_up` has not waited for, and keep all that was compiled."""
        late, self._late = self._late, ()
        if late:
            self._preparation.go_on(late)

    def _meet(self, group: Leader | Follower) -> None:
        """Once all processes have compiled; what rank 0 runs from here on, all run."""
        for bucket in self.executables:  # in the same order in all: XLA may time kernels for other processes too
            self._prepare_score(bucket)
        made = {f"the setting {field.name}": str(getattr(self.settings, field.name)) for field in fields(self.settings)}
        made["the table of steps"] = "; ".join(map(str, self.executables))
        made["the devices"] = ", ".join(device.device_kind for device in self._mesh.devices.flat)
        group.meet(made)
        if isinstance(group, Leader):
            self.launcher.send = group.send
            for bucket in self.executables:
                self._try_out(bucket)

    def install_prepared(self) -> bool:
        """Runs one executable that threads have prepared on padding, and lets it serve. Nothing may be in flight.

        Returns:
            Whether more may come.
        """
        assert not self.in_flight
        pending = self.num_pending  # read first: what is prepared later is found next time
        prepared = self._preparation.take(1)
        for bucket, executable in prepared:
            self._install(bucket, executable)
            self._try_out(bucket)
        return bool(prepared or pending)

    def _try_out(self, bucket: Bucket) -> None:
        """First runs, on padding; of a step in two parts once both are there."""
        if bucket.part == "whole":
            for _ in range(WARMUP_RUNS):
                ran = self.run_padding(bucket)
                self.wait()
            if ran.hidden is not None and bucket.prefill_tokens in self.launcher.scores:
                following = np.zeros(ran.hidden.shape[0], np.int32)
                self._score(bucket, ran.hidden, following).block_until_ready()
            return
        bucket = replace(bucket, part="whole")
        if bucket in self.split_ready:
            inputs = self._padding(bucket)
            for _ in range(WARMUP_RUNS):
                for part in parts(bucket):
                    self._run(part, inputs)
                self.wait()

    def run_padding(self, bucket: Bucket) -> StepArrays:
        """A step without requests, which touches page 0 and slot 0 only."""
        return self._run(bucket, self._padding(bucket))

    def _padding(self, bucket: Bucket) -> np.ndarray:
        return np.zeros(self.settings.data_parallel_size * self.layouts[bucket].size, np.int32)

    @property
    def mask_shape(self) -> tuple[int, int]:
        """(n, words) of a slot's masks."""
        _, n, words = self.compiler.state.masks.shape
        return n, words

    def write_masks(self, slots: np.ndarray, verified: np.ndarray, counts: np.ndarray, words: np.ndarray) -> None:
        """See `MaskStore`."""
        self.launcher.launch(Order(Kind.MASKS, 0, (self._upload.padded(slots, verified, counts, words),)))

    def put(self, **fields: np.ndarray) -> None:
        """Replaces fields of the state that every device of a rank has whole. Not while requests run: it waits for copies."""
        for name, value in fields.items():
            self.launcher.launch(Order(Kind.PUT, StepState._fields.index(name), (value,)))

    def hold(self, drafts: int) -> None:
        """Every slot holds so many drafts, as after a step that proposed them. It waits for nothing, as a step does not."""
        self.launcher.launch(Order(Kind.HOLD, drafts, ()))

    def run_packed(self, bucket: Bucket, inputs: np.ndarray) -> StepArrays:
        """A step of packed inputs, int32 [ranks * size of the bucket's layout], whose output `read` does not give."""
        return self._run(bucket, inputs)

    def executable(self, bucket: Bucket) -> jax.stages.Compiled:
        """What `warm_up` has compiled for a bucket."""
        return self.launcher.steps[bucket]

    def dispatch(self, plan: StepPlan) -> None:
        """Starts a step; its output comes from `read`, in order. Of a split one, only the forward pass: see `choose`."""
        assert self._begun is None
        self._preparation.working(busy=True)
        for late, executable in self._preparation.take_under_load():
            self._install(late, executable)
        if plan.split:
            bucket = bucket_for(self.split_ready, plan)
            inputs, entry = self._packed(bucket, plan)
            self._begun = _Begun(plan, bucket, inputs, entry)
            self._run(parts(bucket)[0], inputs)
            return
        scored = any(map(wants_scores, plan.prefill))
        # A bucket that came late scores nothing.
        able = tuple(b for b in self.ready if b.prefill_tokens in self.launcher.scores) if scored else self.ready
        bucket = bucket_for(able, plan, self.bucket_seconds)
        for row in plan.prefill:
            if row.cached:
                for packed in self._count.packed(row):
                    self.launcher.launch(Order(Kind.COUNTS, 0, (packed,)))
        self._copy_states(plan, lambda row, slot: (row.restored, slot) if row.restored else None)
        inputs, entry = self._packed(bucket, plan)
        step = _Dispatched(plan, bucket, self._run(bucket, inputs), entry)
        self._copy_states(plan, lambda row, slot: (slot, row.kept) if row.kept else None)
        if scored:
            following = following_ids(plan, bucket.prefill_tokens)
            assert step.arrays.hidden is not None
            step.scores = self._score(bucket, step.arrays.hidden, following)
            step.scores.copy_to_host_async()
        self._queue.append(step)

    def _copy_states(self, plan: StepPlan, copy: Callable[[PrefillRow, int], tuple[int, int] | None]) -> None:
        """What `copy` says of each prompt row and its slot on its rank: from where to where, if any."""
        ranks = [
            [pair for row in part.prefill if (pair := copy(row, row.request.slot - rank * self.settings.max_slots))]
            for rank, part in enumerate(plan.parts)
        ]
        if any(ranks):
            self.launcher.launch(Order(Kind.STATES, 0, (self._copies.packed(ranks),)))

    def choose(self) -> None:
        """Lets the rows of the split step choose and draft. All steps before it are read, and its masks are written."""
        begun, self._begun = self._begun, None
        assert begun is not None
        arrays = self._run(parts(begun.bucket)[1], begun.inputs)
        self._queue.append(_Dispatched(begun.plan, begun.bucket, arrays, begun.entry))

    def read(self) -> StepOutput:
        """Waits for the oldest step that was dispatched and not read."""
        step = self._queue.popleft()
        self._preparation.working(busy=bool(self.in_flight))
        scores = None if step.scores is None else unpack(np.asarray(step.scores), step.plan)
        if self.expert_load is not None:
            self.expert_load = replace(self.expert_load, words=step.arrays.expert_load)
        packed, top = self._output_of(step)
        return StepOutput.of(step.plan, step.bucket, packed, step.arrays, top=top, scores=scores)

    def wait(self) -> None:
        """Until everything that was launched has run."""
        self.state.seq_len.block_until_ready()

    def _memory_for_output(self) -> HostMemory:
        """For as many steps as may be unread at once."""
        ranks = self.settings.data_parallel_size
        words = max(bucket.rows * (self._columns(bucket) + top_columns(bucket)) for bucket in self.buckets)
        fit = MOST_OUTPUT_BYTES // HostMemory.bytes_of_entry(ranks, words)
        return HostMemory(max(self.settings.readout_depth + 2, min(MOST_UNREAD, fit)), ranks, words)

    def _columns(self, bucket: Bucket) -> int:
        return packed_columns(bucket.window, self.settings.num_speculative_tokens)

    def _packed(self, bucket: Bucket, plan: StepPlan) -> tuple[np.ndarray, Entry | None]:
        """The input of a plan's step, and where that writes its output, if it does."""
        entry = None if self._host_memory is None else self._host_memory.take()
        return self.layouts[bucket].pack_ranks(plan, self.settings.max_slots, entry), entry

    def _output_of(self, step: _Dispatched) -> tuple[np.ndarray, np.ndarray | None]:
        """`packed` of `StepArrays`, and `top` where a row wants it. Waits for them."""
        if self._host_memory is None or step.entry is None:
            return np.asarray(step.arrays.packed), np.asarray(step.arrays.top) if step.wants_top else None
        bucket, columns = step.bucket, self._columns(step.bucket)
        words = self._host_memory.wait(step.entry, bucket.rows * (columns + top_columns(bucket)), self.state.seq_len)
        packed, top = np.split(words, [bucket.rows * columns], axis=1)
        return packed.reshape(-1, columns), top.reshape(-1, bucket.window, 2 * MAX_LOGPROBS) if step.wants_top else None

    def _prepare_score(self, bucket: Bucket) -> None:
        """What scores a chunk of so many tokens; where a step has all parameters of sampling."""
        P = bucket.prefill_tokens
        if P not in self.launcher.scores and P and bucket.part == "whole" and bucket.variant == "full":
            self.launcher.scores[P] = self.compiler.score(self.executable(bucket).out_info[1].hidden)

    def _load(self, bucket: Bucket) -> Executable | None:
        return self.store.load(self.compiler.key("step", bucket))

    def _save(self, bucket: Bucket, executable: Executable) -> None:
        self.store.save(self.compiler.key("step", bucket), executable)

    def _install(self, bucket: Bucket, executable: Executable) -> None:
        self.launcher.steps[bucket] = executable.compiled
        self.ready = tuple(b for b in self.buckets if b in self.launcher.steps)
        self.split_ready = tuple(b for b in self.split if all(part in self.launcher.steps for part in parts(b)))
        for operation, implementations in executable.kernels.items():
            self.kernels.setdefault(operation, set()).update(implementations)

    def _score(self, bucket: Bucket, hidden: jax.Array, following: np.ndarray) -> jax.Array:
        return self.launcher.launch(Order(Kind.SCORE, bucket.prefill_tokens, (following,)), hidden)

    def _run(self, bucket: Bucket, inputs: np.ndarray) -> Any:
        return self.launcher.launch(self.launcher.step_order(bucket, inputs))
