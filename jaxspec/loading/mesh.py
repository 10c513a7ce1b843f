"""The devices of a model, and what must hold before they talk to each other."""

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import flagged
from jaxspec.errors import ConfigError
from jaxspec.models.params import DATA_AXIS, TENSOR_AXIS
from jaxspec.nodes import devices_of_each

# NCCL and NVSHMEM read these when devices first talk to each other.
_MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
_WHY_OFF = "a program that uses NVLink multicast can put all GPUs of its host out of service, also for others"
# XLA's: one version of jax has it, and the next ends the process over it.
_NVSHMEM_FLAG = "--xla_gpu_experimental_enable_nvshmem"


def make_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh:
    """The devices of `choose_devices` that this process and those of its group see: a row for each rank, if there are several.

    Raises:
        ConfigError: there are fewer, or the environment asks for NVLink multicast.
    """
    if tensor_parallel_size * data_parallel_size > 1:
        switch_multicast_off(os.environ)  # before jax starts, if it has not
    devices = choose_devices(jax.devices(), jax.process_count(), tensor_parallel_size, data_parallel_size)
    if data_parallel_size == 1:
        return Mesh(np.array(devices), (TENSOR_AXIS,))
    return Mesh(np.array(devices).reshape(data_parallel_size, tensor_parallel_size), (DATA_AXIS, TENSOR_AXIS))


def choose_devices(
    devices: Sequence[Any], processes: int, tensor_parallel_size: int, data_parallel_size: int = 1
) -> list[Any]:
    """The first devices in jax's order.

    Of several processes, as many of each, in the order of their ranks.

    Raises:
        ConfigError: there are fewer, or several processes would share ranks of requests.
    """
    if data_parallel_size > 1:
        number, there = tensor_parallel_size * data_parallel_size, len(devices)
        if processes > 1:
            raise ConfigError(
                f"{flagged('data_parallel_size')} {data_parallel_size} is for one process: with several (--nnodes) use "
                f"{flagged('tensor_parallel_size')}, or run replicas (docs/hosts.md)"
            )
        if there < number:
            raise ConfigError(
                f"{flagged('data_parallel_size')} {data_parallel_size} times {flagged('tensor_parallel_size')} "
                f"{tensor_parallel_size} needs {number} devices, but there are {there}"
            )
        return list(devices[:number])
    each = devices_of_each(tensor_parallel_size, processes)
    chosen = []
    for rank in range(processes):
        own = [device for device in devices if device.process_index == rank]
        if len(own) < each:
            of_process = "" if processes == 1 else f" of process {rank}"
            raise ConfigError(
                f"{flagged('tensor_parallel_size')} {tensor_parallel_size} needs {each} devices{of_process}, "
                f"but there are {len(own)}"
            )
        chosen += own[:each]
    return chosen


def switch_multicast_off(environ: MutableMapping[str, str]) -> None:
    """Sets the variables that say so; those that are set must say it already.

    Raises:
        ConfigError: one says otherwise, or XLA's flags ask for NVSHMEM, whose collectives use multicast. Nothing is set then.
    """
    for name, off in _MULTICAST_OFF.items():
        if environ.get(name, off) != off:
            raise ConfigError(f"{name}={environ[name]} is not supported: {_WHY_OFF}; unset it, or set {name}={off}")
    if any(flag.partition("=")[0] == _NVSHMEM_FLAG for flag in environ.get("XLA_FLAGS", "").split()):
        raise ConfigError(f"{_NVSHMEM_FLAG} in XLA_FLAGS is not supported: {_WHY_OFF}; leave it out")
    environ.update(_MULTICAST_OFF)
