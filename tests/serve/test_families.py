"""Each family as people have it: a Hugging Face folder behind the server, a chat, with speculation and without.

Four choices of one chat share a pool that holds fewer: prompts and windows share steps, and requests are retracted.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from jaxspec import EngineConfig
from jaxspec.grammar.compiler import GrammarCompiler
from serve.model import load_model
from tests.conftest import few_buckets
from tests.convert.quantised_checkpoints import quantise
from tests.eagle3_models import tiny_draft
from tests.serve.mock_engine import SPECIAL, TEMPLATE, byte_backend
from tests.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.long]
VOCAB = 256 + len(SPECIAL)
# Variant -> changes of its configuration that give it a NextN layer, or None: it has an EAGLE3 draft.
FAMILIES = {
    "glm4-lite": {}, "v3-mtp": {}, "v32": {}, "glm-dsa": {}, "kimi-k25": {"num_nextn_predict_layers": 1}, "minicpm3": None,
    "gpt-oss": None, "qwen3-moe": None, "minimax-m2": None, "glm4-moe": {}, "qwen3.5": {}, "qwen3.5-moe": None,
    "qwen3-next": {}, "kimi-linear": None,
}  # fmt: skip
# Quantised: the variant, and the format of tests/convert/quantised_checkpoints.py that its MLPs are published in.
QUANTISED = {
    "v3-mtp in FP8": ("v3-mtp", "deepseek"), "kimi-k25 in INT4": ("kimi-k25", "ct-int4"),
    "v3-mtp in NVFP4": ("v3-mtp", "modelopt-nvfp4"), "v3-mtp in MXFP4": ("v3-mtp", "ct-mxfp4"),
}  # fmt: skip
# tests/engine/test_equality.py has speculation on gpt-oss by default, retracted too, with a draft that knows the text.
DEFAULT = ("glm4-lite",)
CHAT = {
    "messages": [{"role": "user", "content": "Say it in forty-one bytes and not in more"}],
    "n": 4, "max_tokens": 24, "seed": 7, "temperature": 0.8, "ignore_eos": True, "logprobs": True,
}  # fmt: skip
RETRACTING = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 6}
K = 2
WHOLE_GROUPS = {"hidden_size": 160, "intermediate_size": 160, "moe_intermediate_size": 160}


@pytest.fixture
def folders(request, tmp_path):
    """The model, with a tokenizer of bytes and a chat template, and its EAGLE3 draft if it needs one."""
    variant, format_name = QUANTISED.get(request.param, (request.param, None))
    changes, draft = FAMILIES[variant], None
    if changes is None:
        draft = str(tiny_draft(tmp_path / "draft", vocab_size=VOCAB))
    sizes = {"vocab_size": VOCAB} | (WHOLE_GROUPS if format_name else {}) | (changes or {})
    folder = tiny_checkpoint(variant, tmp_path / "hf", **sizes)
    if format_name:
        folder, _ = quantise(folder, tmp_path, format_name, lambda name: "_proj.weight" in name and ".mlp." in name)
    PreTrainedTokenizerFast(tokenizer_object=byte_backend(), chat_template=TEMPLATE).save_pretrained(folder)
    return str(folder), draft


def answers(start_server, folder, **options):
    """The tokens of each choice, and the engine's figures."""
    config = EngineConfig(dtype="float32", max_model_len=128, enable_prefix_caching=False, **RETRACTING, **options)
    prepare, prepared = GrammarCompiler.prepare, []
    with pytest.MonkeyPatch.context() as patch:
        few_buckets(patch, decode=False)
        patch.setattr(GrammarCompiler, "prepare", lambda grammars: prepared.append(prepare(grammars)))
        server = start_server(load_model(folder, config, None, lambda *_: None))
        assert len(prepared) == 1, "before the server is ready"
        reply = server.post("/v1/chat/completions", CHAT | {"model": "mock"})
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    texts = [[(t["bytes"], t["token"]) for t in choice["logprobs"]["content"]] for choice in choices]
    assert [len(text) for text in texts] == [CHAT["max_tokens"]] * CHAT["n"]
    return texts, server.service.model().engine.stats()


@pytest.mark.parametrize(
    "folders",
    [v if v in DEFAULT else pytest.param(v, marks=pytest.mark.full) for v in (*FAMILIES, *QUANTISED)],
    indirect=True,
)
def test_a_chat_is_the_same_with_speculation_and_without(folders, start_server):
    folder, draft = folders
    want, plain = answers(start_server, folder)
    got, stats = answers(start_server, folder, num_speculative_tokens=K, speculative_model=draft)
    assert got == want
    assert len({str(text) for text in want}) > 1
    for each in (plain, stats):
        assert each.num_preemptions > 0
    assert stats.acceptance.num_steps > 0
