"""How many tokens a step computes, unless the user says so."""


def default_budget(adaptive_drafts: bool, *, on_gpu: bool) -> int:
    """Tokens of a step.

    On an H200 a prompt token costs about as much in a step of 2048 as in one of 8192 (Moonlight's shape, docs/performance.md,
    "Start"), and running requests wait for 24 ms in the one, 74 in the other. With 4096 prompts that come together start
    sooner than with 2048, as fewer steps carry the rows that decode beside them. Steps with changing numbers of drafts have
    fewer sizes, which fit less.
    """
    if not on_gpu:
        return 256
    return 2048 if adaptive_drafts else 4096
