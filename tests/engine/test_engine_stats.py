"""What the engine counts of its steps."""

from jaxspec.config import Settings
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from tests.engine.mock_runner import MockRunner

VOCAB = 300
SETTINGS = Settings(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96, num_pages=33, dtype="float32", on_gpu=False
)


def test_steps_and_prompt_tokens_are_counted_as_they_are_read():
    engine = Engine(MockRunner(SETTINGS, VOCAB), vocab_size=VOCAB)
    prompt = [i % 250 for i in range(200)]  # three chunks of at most 96 tokens
    engine.add(Request("a", prompt, SamplingParams(max_tokens=5, seed=0)))
    counts, generated = [], 0
    while engine.has_work:
        generated += sum(len(output.new_ids) for output in engine.step())
        stats = engine.stats()
        counts.append((stats.num_steps, stats.prefill_tokens, stats.generation_tokens))
    assert counts[:3] == [(1, 96, 0), (2, 192, 0), (3, 200, 1)]
    assert counts[-1] == (7, 200, 5)
    assert generated == 5
    # The prefix cache has three pages of 64 tokens of this prompt.
    engine.add(Request("b", prompt, SamplingParams(max_tokens=1, seed=0)))
    while engine.has_work:
        engine.step()
    assert engine.stats().prefill_tokens == 200 + 200 - 3 * 64
