"""Settings shared by all tests."""

import dataclasses
import fcntl
import gc
import logging
import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Tests run on the CPU unless they are asked for a GPU with `-m gpu`; jax reads this at its first use.
if os.environ.get("JAXSPEC_TEST_GPU") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    # Compiling is most of the time, and tiny models gain nothing from optimised loops.
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    # One LLVM module an executable: splitting it costs more than two cores gain.
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
    # As many devices as a test's mesh needs; all others use the first one.
    flags.append("--xla_force_host_platform_device_count=4")
    # Without the emitters of fusions, which double compiling. The flag's name depends on the version.
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    else:
        flags.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()

    # The threads of XLA's pool. Each warpgroup of an interpreted kernel that waits at a barrier blocks one of them, and
    # with as few threads as a small machine has cores they wait forever.
    os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

    # PyTorch's threads wait for each other in loops, beside other workers for most of the time; and its models are tiny.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nor does what libraries ask it to compile gain anything; starting the compiler takes half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
else:
    # On a GPU, timing candidates for every matmul is most of a compilation, and any candidate is right. Graphs stay
    # graphs while they are traced.
    for flag in ("--xla_gpu_autotune_level=0", "--xla_enable_command_buffers_during_profiling=true"):
        if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

    # pytest-xdist's workers share the device. What is left is for their contexts and modules, gigabytes each, and for PyTorch.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.5 / workers:.3f}")

# Compiled steps are kept for this run alone, in one folder for all of its workers, which inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _kept = tempfile.TemporaryDirectory(prefix="jaxspec-tests-")
    os.environ["JAXSPEC_CACHE"] = _kept.name

    # Each client of httpx reads the certificates of all authorities, for 18 ms. Tests speak to this machine alone.
    if find_spec("certifi"):
        import certifi

        first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
        _authority = Path(_kept.name, "authority.pem")
        _authority.write_text(first[first.index("-----BEGIN") :] + end)
        os.environ["SSL_CERT_FILE"] = str(_authority)

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

MANY_MAPPINGS = 30_000
LONGEST_FILE = "test_structured.py"


# Tracing makes objects by the hundred thousand that stay; looking through them all each time is 8 % of compiling.
gc.set_threshold(50_000, 50, 50)


def optimise_steps(patch: pytest.MonkeyPatch) -> None:
    """For a model that is large enough to gain from it."""
    import jax

    compile_as_flags_say = jax.stages.Lowered.compile
    options = {} if os.environ.get("JAXSPEC_TEST_GPU") else {"xla_backend_optimization_level": 1}

    def compile_optimised(lowered, more=None):
        return compile_as_flags_say(lowered, options | (more or {}))

    patch.setattr(jax.stages.Lowered, "compile", compile_optimised)


def few_buckets(patch: pytest.MonkeyPatch, *, decode: bool = True) -> None:
    """Runners compile a lean bucket of a single decode row and the largest, which holds every plan.

    Without `decode` only a lean twin of the largest. The sampler of all parameters, which lean ones do without, is more
    than half of a tiny step's compilation.
    """
    from jaxspec.engine.buckets import bucket_table

    def few(settings):
        table = bucket_table(settings)
        smallest, largest = table[0], max(table, key=lambda b: (b.tokens, b.drafts, b.variant == "full"))
        if decode:
            return dataclasses.replace(smallest, variant="lean"), largest
        return (dataclasses.replace(largest, variant="lean"),)

    patch.setattr("jaxspec.engine.runner.bucket_table", few)


@pytest.fixture(scope="session")
def demo_llm():
    """The embedded demo model in float32, compiled once for all tests of all workers."""
    from jaxspec import LLM

    # Other tests' steps are not optimised, which no key knows.
    kept = Path(os.environ["JAXSPEC_CACHE"]) / "optimised"
    kept.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (kept / ".lock").open("w") as lock:
        # Workers that need it meanwhile wait: loading takes a seventh of what compiling takes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("JAXSPEC_CACHE", str(kept))
        optimise_steps(patch)
        few_buckets(patch)
        return LLM("demo", dtype="float32", max_model_len=1024, max_num_batched_tokens=64, seed=0)


@pytest.fixture(autouse=True, scope="session")
def xla_has_read_its_flags():
    """XLA reads them when it starts a device, once, and some tests run commands with flags of their own."""
    import jax

    jax.devices()


def drop_executables() -> None:
    """On a CPU each of an executable's many kernels takes three memory mappings, of which a process may have 65530."""
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or len(mappings.read_bytes().splitlines()) < MANY_MAPPINGS:
        return
    if "tests.engine.tiny" in sys.modules:
        sys.modules["tests.engine.tiny"].forget_all()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def executables_are_dropped():
    yield
    drop_executables()


@pytest.fixture(autouse=True)
def executables_of_matrices_are_dropped(request):
    """One module of a matrix alone can take them all."""
    yield
    if request.node.get_closest_marker("full"):
        drop_executables()


@pytest.fixture(autouse=True)
def log_levels_are_restored():
    """Commands set them for the whole process, and tests run commands."""
    loggers = [logging.getLogger(name) for name in ("", "jaxspec", "jaxspec.kernels", "transformers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    """Lets pytest-xdist keep the order of `pytest_collection_modifyitems`.

    Its own begins with the files of the most tests, so that those with few and long ones come last, where one worker
    waits for another.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before -m looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests are slow, too. Files with slow tests go first. PyTorch's are skipped without it (Python 3.12).

    The longest is the first of all. Others with the demo model come after the rest of the slow ones: workers that want it at
    the same time wait until one has compiled it.
    """
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    sharing = {item.path for item in items if "demo_llm" in getattr(item, "fixturenames", ())}

    def place(item: pytest.Item) -> int:
        if item.path.name == LONGEST_FILE:
            return 0
        if item.path not in slow_files:
            return 3
        return 2 if item.path in sharing else 1

    items.sort(key=place)
    try:
        import torch  # noqa: F401
    except ImportError:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="needs PyTorch: pip install -e '.[test]' on Python 3.11"))
