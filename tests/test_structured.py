"""Structured outputs of the demo model, at temperature 1 with speculation: whatever the schema, the output obeys it."""

import dataclasses
import json

import pytest

from jaxspec import SamplingParams
from jaxspec.sampling.structured import StructuredOutputsParams
from tests.schemas import random_schema, validator_for

PROMPT = "# A value in JSON:\nvalue = "
MAX_TOKENS = 512


def params(schema, **options):
    asked = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=schema)}
    return SamplingParams(**asked | options)


@pytest.mark.long
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_outputs_are_valid(demo_llm, count):
    """At least nine of ten end within the limit, and an independent validator accepts each of these."""
    schemas = [random_schema(seed) for seed in range(count)]
    # The largest first: what they ask for takes longest, and at the end steps would have few rows.
    seeds = sorted(range(count), key=lambda seed: -len(json.dumps(schemas[seed])))
    outputs = demo_llm.generate([PROMPT] * count, [params(schemas[seed], seed=seed) for seed in seeds])
    ended = 0
    for seed, output in zip(seeds, outputs, strict=True):
        schema = schemas[seed]
        assert output.error is None, (seed, output.error)
        if output.finish_reason == "stop":
            ended += 1
            assert validator_for(schema).is_valid(json.loads(output.text)), (seed, schema, output.text)
    accepted = sum(sum(output.accepted) for output in outputs)
    print(f"{ended} of {count} ended; {accepted} drafts accepted")
    assert ended >= 0.9 * count
    assert accepted > count


@pytest.mark.long
def test_same_json_with_and_without_drafts(demo_llm):
    """Greedy, at every number of drafts, alone and in company."""
    schemas = [random_schema(seed) for seed in range(3)]
    greedy = [params(schema, temperature=0.0, max_tokens=32) for schema in schemas]
    together = demo_llm.generate([PROMPT] * len(greedy), greedy)
    plain = demo_llm.generate(
        [PROMPT] * len(greedy), [dataclasses.replace(each, num_speculative_tokens=0) for each in greedy]
    )
    alone = [demo_llm.generate(PROMPT, each)[0] for each in greedy]
    assert [o.ids for o in together] == [o.ids for o in plain] == [o.ids for o in alone]
    assert sum(sum(o.accepted) for o in together) > 0
    assert not any(any(o.accepted) for o in plain)
