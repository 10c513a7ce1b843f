"""All transforms of one position in NumPy float64, one request at a time and in plain loops: an oracle shared by tests."""

import numpy as np

from jaxspec.sampling.params import SamplingParams


def adjusted(raw, prompt, output, params: SamplingParams, stop_ids=(), allowed=None):
    """Raw logits [V] after bias, penalties, min_tokens and a mask bool [V], for the position after prompt and output ids."""
    x = np.asarray(raw, np.float64).copy()
    for token, value in params.logit_bias.items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    too_early = np.isin(np.arange(len(x)), list(stop_ids) if len(output) < params.min_tokens else [])
    allowed = np.ones(len(x), bool) if allowed is None else allowed
    if (allowed & ~too_early).any():  # where a grammar allows nothing but a stop, it may come
        allowed = allowed & ~too_early
    return np.where(allowed, x, -np.inf)


def probabilities(x, params: SamplingParams):
    """The distribution [V] that a random request samples from, given its adjusted logits."""
    x = x / params.temperature
    p = softmax(x)
    p = np.where(p >= params.min_p * p.max(), p, 0)
    if 0 < params.top_k < len(p):
        p = np.where(p >= np.sort(p)[-params.top_k], p, 0)
    p /= p.sum()
    if params.top_p < 1:
        levels = np.unique(p)[::-1]
        keep = next(level for level in levels if p[p >= level].sum() >= params.top_p)
        p = np.where(p >= keep, p, 0)
    return p / p.sum()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()
