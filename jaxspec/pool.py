"""How many KV pages a pool has, and how many tokens need."""

from jaxspec.errors import ConfigError, flagged

PAGE_SIZE = 64


def pages_for(tokens: int, page_size: int = PAGE_SIZE) -> int:
    return -(-tokens // page_size)


def pool_pages(override: int | None, *, max_num_seqs: int, max_model_len: int, page_bytes: int, free_bytes: int) -> int:
    """Pages of the pool: those that were asked for, else as many as fit, but no more than all requests can use.

    Raises:
        ConfigError: they do not hold one request.
    """
    longest = pages_for(max_model_len)
    if override is not None:
        num_pages = override
    elif free_bytes < 0:
        raise ConfigError(
            f"the weights leave no memory for KV pages: raise {flagged('gpu_memory_utilization')}, or split the model over "
            f"more devices with {flagged('tensor_parallel_size')}"
        )
    else:
        num_pages = int(min(max_num_seqs * longest + 1, free_bytes // max(page_bytes, 1)))
    if num_pages < longest + 1:
        fits = max((num_pages - 1) * PAGE_SIZE, 0)
        raise ConfigError(
            f"{num_pages} KV pages of {PAGE_SIZE} tokens ({num_pages * page_bytes / 2**20:.0f} MiB) cannot hold one request of "
            f"{flagged('max_model_len')} {max_model_len}; lower it to at most {fits}, or raise "
            f"{flagged('num_gpu_blocks_override')} or {flagged('gpu_memory_utilization')}"
        )
    return num_pages
