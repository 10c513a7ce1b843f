"""What steps cost on this device, measured by running every bucket with rows that are as busy as requests'.

Padding rows reach no expert and read one page, so steps of padding alone would make windows look free.
"""

import logging
import time

import numpy as np

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import MAX_LEN, NUM_DRAFTS, PARAMS_F, PARAMS_I, STOP_IDS

# Steps in a row that are timed together, and how often; the fastest counts. With those before them a row stays on its page.
STEPS, ROUNDS = 3, 2
# Tokens that decode rows begin with.
CONTEXT = 32
logger = logging.getLogger(__name__)


def measure_costs(runner: Runner, vocab_size: int) -> StepCosts:
    """Runs every bucket of a runner that has been warmed up and serves no request yet, which then knows what each costs.

    KV pages hold other finite values afterwards; the rest of the state that decides what a row does is as before.
    """
    before = {name: np.array(getattr(runner.state, name)) for name in _busy(runner, vocab_size)}
    seconds = {}
    for bucket in runner.buckets:
        for rows in numbers_of_rows(bucket):
            runner.put(**_busy(runner, vocab_size))
            seconds[bucket, rows] = _seconds(runner, bucket, rows, vocab_size)
    runner.put(**before)
    runner.bucket_seconds = {bucket: seconds[bucket, bucket.decode_rows] for bucket in runner.buckets}
    costs = StepCosts(seconds)
    text = "; ".join(f"{bucket}, {rows} rows: {1e3 * value:.2f} ms" for (bucket, rows), value in seconds.items())
    logger.info("measured what steps cost: %s", text)
    return costs


def numbers_of_rows(bucket: Bucket) -> list[int]:
    """How many busy rows a bucket is measured with, fewest first.

    Fewer rows reach fewer experts, and windows cost more beside that: of decode steps also a half and a quarter.
    """
    rows = bucket.decode_rows
    return [rows] if bucket.prefill_tokens else sorted({-(-rows // part) for part in (1, 2, 4)})


def _seconds(runner: Runner, bucket: Bucket, rows: int, vocab_size: int) -> float:
    inputs = np.tile(busy_inputs(runner, bucket, rows, vocab_size), runner.settings.data_parallel_size)
    runner.run_packed(bucket, inputs).packed.block_until_ready()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            arrays = runner.run_packed(bucket, inputs)
        arrays.packed.block_until_ready()
        times.append((time.perf_counter() - started) / STEPS)
    return min(times)


def busy_inputs(runner: Runner, bucket: Bucket, rows: int, vocab_size: int) -> np.ndarray:
    """A rank's packed inputs of a step whose prompts are full, of equal length and begin, in the first slots; `rows` decode."""
    layout = runner.layouts[bucket]
    flat = np.zeros(layout.size, np.int32)
    inputs = layout.split(flat)
    slots = runner.settings.max_num_seqs
    prompts = min(bucket.prefill_rows, max(slots // 2, 1))
    if prompts:
        inputs.chunk_ids[:] = np.random.default_rng(0).integers(0, vocab_size, bucket.prefill_tokens)
        length = min(bucket.prefill_tokens // prompts, runner.settings.max_model_len - 1)
        for row in range(prompts):
            inputs.prefill[row] = (row + 1, 0, length, 1, -1, -1, 0)
    decode = min(rows, slots - prompts)
    inputs.decode_slots[:decode] = prompts + 1 + np.arange(decode)
    return flat


def _busy(runner: Runner, vocab_size: int) -> dict[str, np.ndarray]:
    """Fields of the state in which every slot decodes greedily: some tokens of its own, and drafts where there are any."""
    settings, rng = runner.settings, np.random.default_rng(1)
    S = settings.max_slots
    page_table = 1 + np.arange(S * settings.max_pages, dtype=np.int32).reshape(S, -1) % max(settings.num_pages - 1, 1)
    page_table[0] = 0
    params_i = np.zeros((S, PARAMS_I), np.int32)
    params_i[:, MAX_LEN], params_i[:, NUM_DRAFTS] = settings.max_model_len, settings.num_speculative_tokens
    out = {
        "page_table": page_table,
        "seq_len": np.full(S, min(CONTEXT, settings.max_model_len // 2), np.int32),
        "last_token": rng.integers(0, vocab_size, S).astype(np.int32),
        "done": np.zeros(S, bool),
        "params_f": np.zeros((S, PARAMS_F), np.float32),
        "params_i": params_i,
        "stop_ids": np.full((S, STOP_IDS), -1, np.int32),
    }
    if settings.num_speculative_tokens:
        out["held"] = np.full(S, settings.num_speculative_tokens, np.int32)
        out["drafts"] = rng.integers(0, vocab_size, (S, settings.num_speculative_tokens)).astype(np.int32)
    return {name: np.concatenate([value] * settings.data_parallel_size) for name, value in out.items()}
