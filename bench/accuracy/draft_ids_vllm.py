"""The vLLM stage of `bench draft_ids`: its outputs, and what its proposer drafted."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.accuracy.draft_ids_checkpoints import DRAFTS

NUM_DRAFTS = 3


class Recorder:
    """Keeps what vLLM's proposer returns, one request at a time.

    Attributes:
        steps: of the current request: "known", how many of its tokens were known, the newest one included; "newest",
            that token; "drafts"; and "gaps", by how much each leads the second choice, in nats.
    """

    def __init__(self, proposer: Any):
        self.steps: list[dict[str, Any]] = []
        self._gaps: list[float] = []
        inner = proposer.propose
        recorder = self

        def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = _bind(inner, self, args, kwargs)
            positions, last = bound["target_positions"], bound["token_indices_to_sample"]
            position = int(positions[-1] if last is None else positions[last[0]])
            newest = int(bound["next_token_ids"][0])  # read now: the proposer may reuse the buffers
            recorder._gaps = []
            drafts = inner(self, *args, **kwargs)
            recorder.steps.append(
                {
                    "known": position + 2,
                    "newest": newest,
                    "drafts": drafts[0].tolist(),
                    "gaps": recorder._gaps,
                }
            )
            return drafts

        def greedy_sample(self: Any, hidden_states: Any) -> Any:
            logits = self.model.compute_logits(hidden_states)
            two = logits[0].float().topk(2).values
            recorder._gaps.append(float(two[0] - two[1]))
            return logits.argmax(dim=-1)

        proposer.propose = propose
        proposer._greedy_sample = greedy_sample


def _bind(function: Any, *call: Any) -> dict[str, Any]:
    import inspect

    owner, args, kwargs = call
    bound = inspect.signature(function).bind(owner, *args, **kwargs)
    return dict(bound.arguments)


def run_vllm(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, dtype: str) -> dict[str, dict[str, Any]]:
    """vLLM's outputs and drafts, by name of the checkpoint; one prompt at a time, greedy."""
    # In this process, and with the runner whose proposer is patched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    recorder = Recorder(SpecDecodeBaseProposer)
    out = {}
    for name in DRAFTS:
        engine = _vllm_engine(folder, name, dtype)
        runs = [_run_prompt(engine, recorder, prompt, tokens) for prompt in prompts]
        out[name] = {"vllm": vllm.__version__, "dtype": dtype, "runs": runs}
        del engine
        cleanup_dist_env_and_memory()
    return out


def _vllm_engine(folder: Path, name: str, dtype: str) -> Any:
    import vllm

    head = DRAFTS[name]
    speculation: dict[str, Any] = {"num_speculative_tokens": NUM_DRAFTS, "method": "mtp"}
    if head is not None:
        speculation |= {"method": "eagle3", "model": str(folder / head)}
    return vllm.LLM(
        model=str(folder / name),
        skip_tokenizer_init=True,
        dtype=dtype,
        speculative_config=speculation,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


def _run_prompt(engine: Any, recorder: Recorder, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    recorder.steps = []
    [result] = engine.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    output = [int(t) for t in result.outputs[0].token_ids]
    text = [*prompt, *output]
    # The last step may have gone past the end of the output.
    steps = [step for step in recorder.steps if step["known"] <= len(text)]
    if wrong := [step for step in steps if text[step["known"] - 1] != step["newest"]]:
        raise RuntimeError(f"the proposer's newest token is not the text's: {wrong[0]}")
    return {"prompt": list(prompt), "output": output, "steps": steps}
