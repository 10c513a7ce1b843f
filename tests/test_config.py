"""Speculation in the form of vLLM's speculative config: what it stands for, and what is refused."""

from dataclasses import fields

import pytest

from jaxspec.config import EngineConfig, with_speculative_config
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"num_speculative_tokens": 3}),
        ({"method": "mtp"}, {"num_speculative_tokens": 3}),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"num_speculative_tokens": 1}),
        ({"num_speculative_tokens": 0}, {"num_speculative_tokens": 0}),
        ({"method": "eagle3", "model": "x/y"}, {"num_speculative_tokens": 3, "speculative_model": "x/y"}),
        ({"model": "x/y", "num_speculative_tokens": 5}, {"num_speculative_tokens": 5, "speculative_model": "x/y"}),
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
        ({"zzz": 3}, {}, "unknown key 'zzz' .*known are method, model, num_speculative_tokens"),
        ({"method": "ngram"}, {}, "must be mtp or eagle3, got 'ngram'"),
        ({"method": 3}, {}, "method in speculative_config must be a text, got 3"),
        ({"model": None}, {}, "model in speculative_config must be a text, got None"),
        ({"num_speculative_tokens": "3"}, {}, "must be a whole number, got '3'"),
        ({"num_speculative_tokens": True}, {}, "must be a whole number, got True"),
        ({"num_speculative_tokens": 2.0}, {}, "must be a whole number, got 2.0"),
        ({"num_speculative_tokens": 8}, {}, "between 0 and 7"),
        ({"method": "mtp", "model": "x"}, {}, "own NextN layer"),
        ({"method": "mtp"}, {"speculative_model": "x"}, "own NextN layer"),
        ({"method": "eagle3"}, {}, "needs a draft"),
        ({"method": "eagle3", "model": ""}, {}, "needs a draft"),
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


@pytest.mark.parametrize("value", ["4k", 4.5, True, [1], {}, 10**30, -1, float("nan"), b"x"])
@pytest.mark.parametrize("option", [field.name for field in fields(EngineConfig)])
def test_a_value_of_no_use_is_an_error_that_names_the_option_and_its_flag(option, value):
    usable = {
        "4k": {"log_steps", "speculative_model", "compilation_cache_dir"},
        "4.5": {"synthetic_acceptance_length"},
        "True": {"adaptive_speculation", "enable_mixed_batch", "enable_prefix_caching"},
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


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq' \(did you mean max_num_seqs\?\)"):
        LLM("demo", max_num_seq=4)
    with pytest.raises(ConfigError, match="unknown option 'zzz'"):
        LLM("demo", zzz=4)
