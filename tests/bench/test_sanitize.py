"""`bench sanitize`, with a sanitizer that only says what it is told to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.kernel import sanitize

ROOT = Path(__file__).parents[2]
PASSED, FAILED = ".  [100%]\n1 passed in 3.14s\n", "F  [100%]\n1 failed in 3.14s\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
HAZARDS = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
READ = "========= Invalid __global__ read of size 4 bytes\n"
ERRORS = READ + "========= ERROR SUMMARY: 1 error\n"
# By kernel: what its test and the sanitizer say, and whether XLA compiles it.
SAYS = {
    "faulty_handover": (PASSED + HAZARDS, True),
    "faulty_row": (FAILED + ERRORS, True),
    "faulty_triton_row": (ERRORS, True),
    "norm_linear": (PASSED + CLEAN, True),
    "kv_write": (PASSED + CLEAN, False),
    "mla_query": (PASSED + HAZARDS, True),
    "moe_up": ("", True),
    "moe_down": (PASSED, True),
    "logits_stats": (FAILED + CLEAN, True),
    "mla_decompress": ("hang", True),
    "mla_prefill": ("hang once", True),
    "moe_gather": ("crash once", True),
    "moe_plan": (READ, True),
    "moe_count": (READ + "hang once", True),
}
OUTCOMES = {
    "norm_linear": "clean",
    "kv_write": "not run",
    "mla_query": "found",
    "moe_up": "crashed",
    "moe_down": "crashed",
    "logits_stats": "failed",
    "moe_plan": "found",
}


@pytest.fixture
def sanitizer(tmp_path):
    script = tmp_path / "compute-sanitizer"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, re, sys, time\n"
        "parent = os.getppid()\n"
        f"says = {SAYS!r}\n"
        "assert sys.argv[1] == '--tool' and sys.argv[2] in ('memcheck', 'racecheck')\n"
        "assert sys.argv[3] == '--kernel-name'\n"
        "options = sys.argv[5 : sys.argv.index('-m') - 1]\n"
        "assert '--force-blocking-launches' in options\n"
        "assert ('--padding 2048 --report-api-errors no' in ' '.join(options)) == (sys.argv[2] == 'memcheck')\n"
        "assert sys.argv[sys.argv.index('-m') + 1] == 'pytest'\n"
        "assert os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] == 'cuda_async'\n"
        "assert '--xla_gpu_force_compilation_parallelism=1' in os.environ['XLA_FLAGS']\n"
        "assert os.environ['JAXSPEC_TEST_GPU'] == '1'\n"
        "symbol = sys.argv[4].removeprefix('kernel_substring=')\n"
        "text, compiled = says[symbol.removesuffix('_mosaic_gpu')]\n"
        "once = f'{os.path.dirname(sys.argv[0])}/{symbol}.{sys.argv[2]}'\n"
        "if 'once' in text and os.path.exists(once):\n"
        f"    text = {PASSED + CLEAN!r}\n"
        "open(once + '.part', 'w').write(str(os.getpid()))\n"
        "os.replace(once + '.part', once)\n"
        "folder = re.search(r'--xla_dump_to=(\\S+)', os.environ['XLA_FLAGS'])[1]\n"
        "open(f'{folder}/module.txt', 'w').write(symbol if compiled else 'another_mosaic_gpu')\n"
        "print(text, end='', flush=True)\n"
        "while 'hang' in text and os.getppid() == parent: time.sleep(0.01)\n"
        "sys.exit(0 if text else 139)\n"
    )
    script.chmod(0o755)
    return script


def test_outcomes(sanitizer, tmp_path, capsys):
    out = tmp_path / "sanitize.json"
    arguments = ["sanitize", "--sanitizer", str(sanitizer), "--out", str(out), "--commit", "abc"]
    assert main([*arguments, "--kernels", ",".join(OUTCOMES)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert {row["kernel"]: row["outcome"] for row in rows} == OUTCOMES
    assert [row["tool"] for row in rows] == ["memcheck", "racecheck"] * len(OUTCOMES)
    assert all(("output" in row) == (row["outcome"] != "clean") for row in rows)
    found = {row["kernel"]: row["output"] for row in rows if row["outcome"] == "found"}
    assert found == {"mla_query": HAZARDS.strip(), "moe_plan": READ.strip()}
    assert "mla_query" in capsys.readouterr().out
    assert main([*arguments, "--kernels", "norm_linear"]) == 0


def test_faults_that_are_missed(sanitizer, tmp_path, capsys):
    """A sanitizer that calls everything clean shows nothing."""
    sanitizer.write_text(
        sanitizer.read_text().replace("says[symbol", "{**says, 'faulty_row': says['norm_linear']}[symbol")
    )
    out = tmp_path / "sanitize.json"
    arguments = ["sanitize", "--sanitizer", str(sanitizer), "--out", str(out), "--commit", "abc"]
    assert main([*arguments, "--kernels", "norm_linear"]) == 1
    assert "memcheck missed the fault of faulty_row_mosaic_gpu (clean)" in capsys.readouterr().out
    assert [row["outcome"] for row in json.loads(out.read_text())["faulty"]] == ["found", "clean", "found"]


@pytest.mark.long
def test_attempts(sanitizer, tmp_path):
    """A run is repeated while the sanitizer crashes or hangs, and the record says how often."""
    out = tmp_path / "sanitize.json"

    def outcomes(*options: str) -> list[tuple[list[str], str]]:
        """Of each run: of the attempts before the last one, and of that one."""
        main(["sanitize", "--sanitizer", str(sanitizer), "--out", str(out), "--commit", "abc", *options])
        return [(row.get("before", []), row["outcome"]) for row in json.loads(out.read_text())["rows"]]

    assert outcomes("--kernels", "moe_gather") == [(["crashed"], "clean")] * 2
    assert outcomes("--kernels", "moe_up") == [(["crashed"] * 2, "crashed")] * 2
    assert outcomes("--kernels", "moe_up", "--attempts", "1") == [([], "crashed")] * 2
    for found in ("mla_query", "moe_plan"):  # what was found is not tried away
        assert outcomes("--kernels", found) == [([], "found")] * 2
    assert outcomes("--kernels", "moe_count", "--timeout", "3") == [([], "found")] * 2
    assert outcomes("--kernels", "mla_prefill", "--timeout", "3") == [(["timed out"], "clean")] * 2
    never = outcomes("--kernels", "mla_decompress", "--timeout", "1", "--attempts", "2")
    assert never == [(["timed out"], "timed out")] * 2


def test_record_of_what_has_ended(sanitizer, tmp_path):
    """Whoever stops it keeps what there was until then."""
    out = tmp_path / "sanitize.json"
    command = [sys.executable, "-m", "bench", "sanitize", "--sanitizer", str(sanitizer), "--out", str(out)]
    command += ["--commit", "abc", "--jobs", "1", "--timeout", "30", "--attempts", "1"]
    command += ["--kernels", "norm_linear,mla_decompress"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while not out.exists() or '"clean": 2' not in (text := out.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert json.loads(text)["summary"] == {"clean": 2, "not finished": 2}


def test_bad_options(tmp_path, capsys):
    assert main(["sanitize", "--sanitizer", str(tmp_path / "none"), "--kernels", "norm_linear"]) == 1
    assert "--sanitizer" in capsys.readouterr().err
    assert main(["sanitize", "--jobs", "0"]) == 1
    assert "--jobs 0" in capsys.readouterr().err
    assert main(["sanitize", "--attempts", "0"]) == 1
    assert "--attempts 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_what_runs_ends_with_it(sanitizer, tmp_path, sent, code):
    """And is no verdict, nor is anything started after it: both jobs hang, and a kernel is left."""
    out = tmp_path / "sanitize.json"
    started = [tmp_path / f"mla_decompress_mosaic_gpu.{tool}" for tool in sanitize.TOOLS]
    # SIGINT that is ignored here, as in what a shell starts with `&`, would be ignored there too.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from bench.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "sanitize", "--sanitizer", str(sanitizer), "--out", str(out)]
    command += ["--commit", "abc", "--jobs", "2", "--timeout", "600"]
    command += ["--kernels", "norm_linear,mla_decompress,moe_gather"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while not all(file.exists() for file in started):
            assert process.poll() is None
            time.sleep(0.1)
        hanging = [int(file.read_text()) for file in started]
        for one in hanging:
            os.kill(one, 0)
        process.send_signal(sent)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
    for one in hanging:
        with pytest.raises(ProcessLookupError):
            os.kill(one, 0)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["kernel"], row["outcome"]) for row in rows] == [("norm_linear", "clean")] * 2
    assert not list(tmp_path.glob("moe_gather*"))


@pytest.mark.long
def test_every_kernel_has_its_test():
    """Under the id that is named, which changes with a test's parameters."""
    options = ["-o", "addopts=", "-m", "gpu", "--collect-only", "-q"]
    options += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:schemathesis"]
    named = [f"tests/gpu/{kernel.test}" for kernel, _ in sanitize.FAULTY]
    # One process, which imports all that they need once.
    program = (
        f"import pytest; pytest.main({[*options, 'tests/gpu']}); print('named:'); pytest.main({[*options, *named]})"
    )
    listed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    every, _, asked = listed.stdout.partition("named:")
    tests = {line.removeprefix("tests/gpu/") for line in every.splitlines()}
    assert {kernel.test for kernel in sanitize.KERNELS} <= tests
    # These are named, or they do not run.
    assert all(kernel.test in asked for kernel, _ in sanitize.FAULTY)
    assert not any(kernel.test in tests for kernel, _ in sanitize.FAULTY)
    assert len({kernel.symbol for kernel in sanitize.KERNELS}) == len(sanitize.KERNELS)
