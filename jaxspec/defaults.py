"""What an engine does unless the user says so, where that depends on the device."""


def drafts_by_load(devices: int, *, on_gpu: bool) -> bool:
    """Whether each step's number of drafts is chosen.

    On one GPU it is within a few percent of the best fixed number of drafts at nearly every load that was measured, where
    always three can be 40 % slower than none (docs/speculation.md, "Drafting that follows the load"). Several GPUs were not
    measured, and there all steps would have the sampler that knows every parameter. A CPU would compile three times as many
    steps.
    """
    return on_gpu and devices == 1


def token_budget(adaptive_drafts: bool, most_decode_tokens: int, *, on_gpu: bool) -> int:
    """Tokens of a step.

    On an H200 a prompt token costs about as much in a step of 2048 as in one of 8192 (Moonlight's shape, docs/performance.md,
    "Start"), and running requests wait for 24 ms in the one, 74 in the other. With 4096 prompts that come together start
    sooner than with 2048, as fewer steps carry the rows that decode beside them. Steps with changing numbers of drafts have
    fewer sizes, which fit less.

    Args:
        most_decode_tokens: a step must hold a window of every request.
    """
    if not on_gpu:
        return 256
    return 2048 if adaptive_drafts and most_decode_tokens <= 2048 else 4096
