"""Steps that read prompts while rows decode: those of a server while requests come, which neither of both alone shows."""

from typing import Any

from bench.harness.timing import ms
from jaxspec.engine.calibration import busy_counts, busy_state, step_seconds
from jaxspec.engine.engine import Engine


def prompt_steps(engine: Engine, vocab_size: int, context: int) -> list[dict[str, Any]]:
    """Of each compiled bucket with prompts: its time in milliseconds, beside as many busy rows as it has, with as many
    prompt tokens as requests of the engine's length fill.

    What is left of requests that run in the engine is overwritten.

    Args:
        context: tokens of each decode row; the prompts are of equal length, and begin.
    """
    runner, figures = engine.runner, []
    settings = runner.settings
    pages = [list(range(1, settings.num_pages))] * settings.data_parallel_size
    state = busy_state(settings, vocab_size, pages, context)
    for bucket in runner.ready:
        if bucket.prefill_tokens:
            prompts, length, rows = busy_counts(bucket, bucket.decode_rows, settings)
            (seconds,) = step_seconds(runner, [(bucket, rows)], state, vocab_size).values()
            tokens = prompts * length * settings.data_parallel_size
            figures.append(
                {
                    "bucket": str(bucket),
                    "prompt_tokens": tokens,
                    "decode_rows": rows * settings.data_parallel_size,
                    "step_ms": ms(seconds),
                    "prompt_tokens_per_s": round(tokens / seconds),
                }
            )
    return figures
