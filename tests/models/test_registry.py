"""What is supported is said alike by the registry, the command, the page and the errors."""

from pathlib import Path

import pytest

from jaxspec.errors import ModelFormatError
from jaxspec.models import unsupported
from jaxspec.models.eagle3 import READERS
from jaxspec.models.registry import FAMILIES, read_config
from serve import cli

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def refusal(**hf):
    with pytest.raises(ModelFormatError) as caught:
        read_config(hf)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_command_and_the_page_list_every_architecture(capsys):
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    page = PAGE.read_text()
    for name, family in FAMILIES.items():
        (line,) = [line for line in lines if line.split()[0:1] == [name]]
        assert family.published.models
        assert family.published.models in line
        assert ("MTP" in line) == family.published.mtp
        assert family.published.note in line
        assert f"| `{name}` |" in page
    assert all(name in lines[-1] for name in READERS)


@pytest.mark.parametrize("architecture", sorted(unsupported.KNOWN))
def test_known_architectures_name_a_supported_one(architecture):
    nearest, missing = unsupported.KNOWN[architecture]
    assert architecture not in FAMILIES
    assert nearest in FAMILIES
    text = refusal(architectures=[architecture])
    assert (
        f"unsupported architecture {architecture}; the nearest supported one is {nearest}, which lacks {missing}"
        in text
    )
    assert "jaxspec models" in text


@pytest.mark.parametrize(
    ("hf", "nearest", "missing"),
    [
        ({"architectures": ["NewForCausalLM"], "kv_lora_rank": 512}, "DeepseekV3ForCausalLM", "a reader of its config"),
        ({"architectures": ["Qwen3ForCausal"]}, "Qwen3ForCausalLM", "a reader of its config"),
        ({"architectures": ["T5"], "is_encoder_decoder": True}, "LlamaForCausalLM", "an encoder"),
        ({"architectures": ["X"], "layer_types": ["linear_attention"]}, "LlamaForCausalLM", "linear attention"),
        (
            {"architectures": ["X"], "text_config": {}, "layer_types": 5},
            "LlamaForCausalLM",
            "a reader of its text part",
        ),
    ],
)
def test_others_name_the_nearest_by_what_they_have(hf, nearest, missing):
    assert f"the nearest supported one is {nearest}, which lacks {missing}" in refusal(**hf)


def test_no_architecture_at_all():
    assert "none named in config.json" in refusal()
