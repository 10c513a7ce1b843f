"""Speculation in the form of vLLM's speculative config: what it stands for, and what is refused."""

from dataclasses import fields

import pytest

from jaxspec.config import EngineConfig, Lookup, resolve
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.speculative_config import with_speculative_config


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"num_speculative_tokens": 3}),
        ({"method": "mtp"}, {"num_speculative_tokens": 3}),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"num_speculative_tokens": 1}),
        ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 0}),
        ({"method": "eagle3", "model": "x/y"}, {"num_speculative_tokens": 3, "speculative_model": "x/y"}),
        ({"model": "x/y", "num_speculative_tokens": 5}, {"num_speculative_tokens": 5, "speculative_model": "x/y"}),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
            {
                "num_speculative_tokens": 3,
                "speculative_method": "ngram",
                "prompt_lookup_max": 5,
                "prompt_lookup_min": 2,
            },
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 16, "suffix_decoding_max_cached_requests": 0},
            {"num_speculative_tokens": 3, "speculative_method": "suffix", "prompt_lookup_max": 16},
        ),
        (
            {"method": "ngram+eagle3", "model": "x"},
            {"num_speculative_tokens": 3, "speculative_method": "ngram+eagle3", "speculative_model": "x"},
        ),
    ],
)
def test_it_stands_for_options(given, options):
    assert with_speculative_config(EngineConfig(), given) == EngineConfig(**options)
    assert with_speculative_config(EngineConfig(seed=5), given) == EngineConfig(seed=5, **options)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            {"num_speculative_token": 3},
            {},
            "unknown key 'num_speculative_token' .*did you mean 'num_speculative_tokens'",
        ),
        ({"zzz": 3}, {}, "unknown key 'zzz' .*known are method, model, num_speculative_tokens, prompt"),
        ({"method": "medusa"}, {}, "must be mtp, eagle3, ngram, suffix, .* or suffix.eagle3, got 'medusa'"),
        ({"method": "ngram", "model": "x"}, {}, r"uses no draft model, .* leave it out, or use ngram\+eagle3"),
        ({"method": "ngram+eagle3"}, {}, r"ngram\+eagle3 needs a draft"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, {}, "5 is over prompt_lookup_max .* 2"),
        ({"method": "ngram", "prompt_lookup_max": 65}, {}, "must be between 1 and 64"),
        ({"method": "mtp", "prompt_lookup_max": 2}, {}, "is for speculative_method .* ngram or suffix"),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 5},
            {},
            "only be 0, for drafts are looked up in the",
        ),
        ({"method": 3}, {}, "method in speculative_config must be a text, got 3"),
        ({"model": None}, {}, "model in speculative_config must be a text, got None"),
        ({"num_speculative_tokens": "3"}, {}, "must be a whole number, got '3'"),
        ({"num_speculative_tokens": True}, {}, "must be a whole number, got True"),
        ({"num_speculative_tokens": 2.0}, {}, "must be a whole number, got 2.0"),
        ({"num_speculative_tokens": 8}, {}, "between 0 and 7"),
        ({"method": "mtp", "model": "x"}, {}, "mtp uses no draft model, .* leave it out, or use eagle3"),
        ({"method": "mtp"}, {"speculative_model": "x"}, "mtp uses no draft model, .* leave it out, or use eagle3"),
        ({"method": "eagle3"}, {}, "eagle3 needs a draft: name one with speculative_model"),
        ({"method": "eagle3", "model": ""}, {}, r"speculative_model \(.*\) must be"),
        ({"model": "x"}, {"speculative_model": "x"}, r"speculative_model \(.*\) is given twice"),
        ({"num_speculative_tokens": 2}, {"num_speculative_tokens": 2}, r"num_speculative_tokens \(.*\) is given twice"),
        ("mtp", {}, "must be an object"),
        ([], {}, "must be an object"),
    ],
)
def test_what_makes_no_sense_is_refused(given, options, message):
    with pytest.raises(ConfigError, match=message):
        with_speculative_config(EngineConfig(**options), given)
    with pytest.raises(ConfigError, match=message):
        LLM("demo", speculative_config=given, **options)


def test_options_fill_what_the_config_leaves_open():
    config = with_speculative_config(EngineConfig(num_speculative_tokens=5), {"method": "eagle3", "model": "x"})
    assert (config.speculative_model, config.num_speculative_tokens) == ("x", 5)
    config = with_speculative_config(EngineConfig(speculative_model="x"), {"method": "eagle3"})
    assert (config.speculative_model, config.num_speculative_tokens) == ("x", 3)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"speculative_method": "ngram"}, Lookup(2, 4)),
        ({"speculative_method": "ngram", "prompt_lookup_max": 1}, Lookup(1, 1)),
        ({"speculative_method": "ngram", "prompt_lookup_min": 7}, Lookup(7, 7)),
        ({"speculative_method": "suffix"}, Lookup(1, 24, per_token=1.0)),
        ({"speculative_method": "ngram+mtp"}, Lookup(3, 4, beside_model=True)),
        ({"speculative_method": "ngram+mtp", "prompt_lookup_min": 2}, Lookup(2, 4, beside_model=True)),
        ({"speculative_method": "ngram", "num_speculative_tokens": 0}, None),
        ({"speculative_method": "mtp"}, None),
        ({}, None),
    ],
)
def test_what_is_compared(options, found):
    assert EngineConfig(**{"num_speculative_tokens": 3, **options}).lookup == found


@pytest.mark.parametrize("value", ["4k", 4.5, True, [1], {}, 10**30, -1, float("nan"), b"x"])
@pytest.mark.parametrize("option", [field.name for field in fields(EngineConfig)])
def test_a_value_of_no_use_is_an_error_that_names_the_option_and_its_flag(option, value):
    usable = {
        "4k": {"log_steps", "speculative_model", "speculative_token_map", "compilation_cache_dir"},
        "4.5": {"synthetic_acceptance_length"},
        "True": {
            "adaptive_speculation",
            "enable_expert_parallel",
            "enable_mixed_batch",
            "enable_prefix_caching",
            "expert_load_metrics",
        },
        "[1]": {"speculative_capture_layers"},
        "-1": {"seed", "synthetic_acceptance_length"},
        str(10**30): {"synthetic_acceptance_length"},
        "nan": {"synthetic_acceptance_length"},
    }
    if option in usable.get(str(value), ()):
        EngineConfig(**{option: value})
        return
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **{option: value})
    assert str(caught.value).startswith(f"{option} (--{option.replace('_', '-')}) must be ")
    assert "\n" not in str(caught.value)


def test_options_that_need_a_model_that_drafts():
    with pytest.raises(ConfigError, match=r"needs the tokens to choose from: give speculative_token_map \(--spec"):
        EngineConfig(speculative_vocab_size=5)
    with pytest.raises(ConfigError, match="drafts where it finds something: leave one of them out"):
        LLM("demo", speculative_method="ngram", synthetic_acceptance_length=2.0)
    with pytest.raises(ConfigError, match="is for drafts of a model, and no model drafts"):
        LLM("demo", speculative_method="ngram", speculative_token_map="x")


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq' \(did you mean max_num_seqs\?\)"):
        LLM("demo", max_num_seq=4)
    with pytest.raises(ConfigError, match="unknown option 'zzz'"):
        LLM("demo", zzz=4)


@pytest.mark.parametrize(
    ("options", "on_gpu", "by_load", "budget"),
    [
        ({}, True, True, 2048),
        ({"speculative_method": "ngram"}, True, True, 2048),
        ({"adaptive_speculation": False}, True, False, 4096),
        ({"num_speculative_tokens": 0}, True, False, 4096),
        ({"num_speculative_tokens": 0, "adaptive_speculation": True}, True, False, 4096),
        ({"max_num_seqs": 1000}, True, True, 4096),  # 2048 would not hold their windows
        ({"tensor_parallel_size": 2}, True, False, 4096),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, True, False, 4096),
        ({"tensor_parallel_size": 2, "adaptive_speculation": True}, True, True, 2048),
        ({}, False, False, 256),
        ({"adaptive_speculation": True}, False, True, 256),
    ],
)
def test_drafts_follow_the_load_by_default_on_one_gpu(options, on_gpu, by_load, budget):
    config = EngineConfig(**{"num_speculative_tokens": 3, **options})
    settings = resolve(config, model_max_position=4096, page_bytes=2**20, free_bytes=2**40, on_gpu=on_gpu)
    assert (settings.adaptive_drafts, settings.max_num_batched_tokens) == (by_load, budget)
