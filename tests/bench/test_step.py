"""`bench step` and `bench step_vllm`: checkpoints, the arithmetic of loops, peers and gates, and small whole runs."""

import argparse
import dataclasses
import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.models import draw, load, mesh_of_one
from bench.harness.shards import Tensor, split_shards
from bench.step import checkpoint as random_checkpoint
from bench.step import step_vllm
from bench.step.engines import build_engine, executables, measured_buckets, warm_up
from bench.step.gates import PeerError, add_peers, gates, read_peers
from bench.step.load import Load, TimesByRows, count_kernels
from bench.step.report import loop_table
from bench.step.sizes import Sizes, choose_sizes
from convert.convert import convert_checkpoint
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.step_log import StepTimes
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny shape, in several shards."""
    folder = tmp_path_factory.mktemp("step") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_checkpoint, "SHARD_BYTES", 2**17)
        size = random_checkpoint.make(folder, random_checkpoint.checkpoint_config("tiny"))
    reader = SafetensorsReader(folder)
    assert len(reader.files) > 2
    assert size == sum(info.nbytes for info in reader.tensors.values())
    return folder


def test_shards_are_filled_in_order():
    weights = {name: {name: Tensor("BF16", (size,))} for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1))}
    assert [list(shard) for shard in split_shards(weights, 10)] == [["a", "b"], ["c"], ["d"]]
    assert Tensor("F32", (2, 3)).nbytes == 24


def test_a_checkpoint_is_random(checkpoint):
    """As the docstring says; no two tensors alike but the NextN layer's copies."""
    reader = SafetensorsReader(checkpoint)
    values = {name: reader.read(name).astype(np.float32) for name in reader.tensors}
    for name, value in values.items():
        if "norm" in name:
            assert (value == 1).all()
        elif "bias" in name:
            assert (value == 0).all()
        else:
            spread = 1.0 if "embed" in name else 0.02
            assert value.std() == pytest.approx(spread, rel=0.15)
            assert abs(value.mean()) < 0.15 * spread
    assert np.array_equal(values["model.layers.2.embed_tokens.weight"], values["model.embed_tokens.weight"])
    assert np.array_equal(values["model.layers.2.shared_head.head.weight"], values["lm_head.weight"])
    experts = [values[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)]
    assert np.abs(np.corrcoef([e.ravel() for e in experts]) - np.eye(8)).max() < 0.1
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["model_type"]) == (1, "deepseek_v3")
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode("as servers do")
    assert tokenizer.decode(ids) == "as servers do"
    assert 0 <= min(ids) <= max(ids) < config["vocab_size"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_is_read_as_conversion_reads_it(checkpoint, tmp_path, dtype):
    """Every parameter bit for bit."""
    mesh, kind = mesh_of_one(), np.dtype(jax.numpy.dtype(dtype))
    direct = load(str(checkpoint), mesh, kind)
    converted = open_checkpoint(convert_checkpoint(checkpoint, tmp_path / "out"))
    assert direct.draft is not None
    for ours, theirs in (
        (direct.params, load_params(converted, mesh, kind)[1]),
        (direct.draft[1], load_nextn(converted, mesh, kind)[1]),
    ):
        flat, structure = jax.tree.flatten(ours)
        expected, expected_structure = jax.tree.flatten(theirs)
        assert structure == expected_structure
        for a, b in zip(flat, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_folder_without_a_tensor_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_routed_experts": 9}))
    with pytest.raises(ModelFormatError, match=r"lacks tensor .*experts\.8\."):
        load(str(folder), mesh_of_one(), np.dtype(np.float32))


class FakeClock:
    """Stands still but for what a fake engine takes."""

    def __init__(self):
        self.now = 100.0
        self.calls: list[tuple[int, int]] = []

    def generate(self, prompts, tokens):
        """A millisecond a prompt token and request, then 10 ms a token, and a slow third call of each kind."""
        self.calls.append((len(prompts), tokens))
        slow = 7.0 if len(self.calls) in (5, 6) else 0.0
        self.now += 0.001 * sum(map(len, prompts)) + 0.01 * (tokens - 1) + slow

    def __call__(self):
        return self.now


def test_engines_get_the_same_prompts():
    """Fewer rows get the first ones of more, each time."""
    clock, seen = FakeClock(), []

    def generate(prompts, tokens):
        seen.append(prompts)
        clock.generate(prompts, tokens)

    for rows in (2, 3):
        step_vllm.measure(generate, rows, context=5, steps=2, repeats=1, vocab_size=99, clock=clock)
    every = step_vllm.random_prompts(3, 5, 99)
    assert seen == 4 * [every[:2]] + 4 * [every]


def test_time_of_a_token_is_a_difference():
    clock = FakeClock()
    figures = step_vllm.measure(clock.generate, 4, context=50, steps=20, repeats=3, vocab_size=99, clock=clock)
    assert clock.calls == [(4, 1), (4, step_vllm.WARM_UP_TOKENS), *[(4, 1), (4, 21)] * 3]
    assert figures["first_token_s"] == 0.2  # the slow run is not the median
    assert figures["all_tokens_s"] == 0.4
    assert figures["of_each_run_ms"] == [10, 10, 10]
    assert figures["step_ms"] == 10
    assert figures["prefill_tokens_per_s"] == 1000


@pytest.fixture
def fake_vllm(monkeypatch):
    """vLLM's interface as far as it is used; the engine remembers what it was made with."""
    made = []

    class FakeLLM:
        short = 0  # tokens that every request lacks

        def __init__(self, **options):
            made.append(options)
            scheduler = SimpleNamespace(max_num_batched_tokens=16384)
            self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=scheduler))

        def generate(self, prompts, params, use_tqdm):
            assert not use_tqdm
            assert params.ignore_eos
            assert params.temperature == 0
            output = SimpleNamespace(token_ids=[0] * (params.max_tokens - self.short))
            return [SimpleNamespace(outputs=[output]) for _ in prompts]

    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace, __version__="0.24.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    cuda = SimpleNamespace(get_device_name=lambda: "a device")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return SimpleNamespace(made=made, LLM=FakeLLM)


def vllm_arguments(folder) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    step_vllm.add_arguments(parser)
    return parser.parse_args(["vllm", str(folder), "--rows", "1,2", "--context", "16", "--repeats", "2"])


def test_both_methods_are_asked_of_vllm(checkpoint, fake_vllm):
    plain, mtp = (step_vllm.run_vllm(vllm_arguments(checkpoint), method) for method in ("plain", "mtp"))
    assert fake_vllm.made[0]["speculative_config"] is None
    assert fake_vllm.made[1]["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert not any(options["enable_prefix_caching"] for options in fake_vllm.made)
    assert all(options["max_num_seqs"] == 2 for options in fake_vllm.made)
    assert (plain["num_speculative_tokens"], plain["output_tokens"]) == (0, 128)
    assert (mtp["num_speculative_tokens"], mtp["output_tokens"]) == (3, 64)
    assert [row["rows"] for row in mtp["rows"]] == [1, 2]
    assert mtp["max_num_batched_tokens"] == 16384


def test_what_vllm_gives_is_a_peer(checkpoint, fake_vllm, tmp_path):
    words = ["step_vllm", "vllm", str(checkpoint), "--rows", "1,2", "--context", "16", "--results", str(tmp_path)]
    for method in ("plain", "mtp"):
        assert main([*words, "--only", method]) == 0
    files = [tmp_path / "vllm_plain.json", tmp_path / "vllm_mtp.json"]
    peers = read_peers(files, tokens=3, context=16)
    assert {name: [row["rows"] for row in found["rows"]] for name, found in peers.items()} == {
        "plain": [1, 2], "cycle": [1, 2],
    }  # fmt: skip
    assert peers["plain"]["environment"]["cpu_cores"]
    assert len(fake_vllm.made) == 2


@pytest.mark.parametrize("script", [True, False])
def test_each_method_has_a_process(checkpoint, monkeypatch, script):
    words = ["step_vllm", "vllm", str(checkpoint), "--rows", "4"]
    monkeypatch.setattr(sys, "argv", ["jaxspec", *["bench"] * script, *words])
    started = []

    def fake_run(command, *, check):
        assert not check
        started.append(command)
        return SimpleNamespace(returncode=len(started) - 1)

    monkeypatch.setattr(step_vllm.subprocess, "run", fake_run)
    assert main(words) == 1  # the second one's
    expected = [[sys.executable, "-m", "bench", *words, "--only", method] for method in ("plain", "mtp")]
    assert started == expected


def test_a_short_answer_of_vllm_is_no_time(checkpoint, fake_vllm):
    fake_vllm.LLM.short = 1
    with pytest.raises(RuntimeError, match="1 tokens were asked of each request"):
        step_vllm.run_vllm(vllm_arguments(checkpoint), "plain")


def figures(step, alternating, prefill):
    return {"step_ms": step, "step_alternating_ms": alternating, "prefill_tokens_per_s": prefill}


def peer(drafted, *rows, context=1024):
    each = [{"rows": n, "step_ms": step, "prefill_tokens_per_s": prefill} for n, step, prefill in rows]
    return {"num_speculative_tokens": drafted, "context": context, "rows": each}


def test_gates_of_figures_beside_a_peer(tmp_path):
    files = [tmp_path / "plain.json", tmp_path / "mtp.json"]
    files[0].write_text(json.dumps(peer(0, (1, 4.0, 1000), (32, 10.0, 2000))))
    files[1].write_text(json.dumps(peer(3, (1, 8.0, 1000))))
    rows = [
        {"rows": 1, **figures(2.0, 2.4, 1500), "cycle": figures(7.0, 8.0, 900)},
        {"rows": 32, **figures(8.8, 9.6, 1800), "cycle": figures(20.0, 20.0, 900)},
    ]
    add_peers(rows, read_peers(files, tokens=3, context=1024))
    assert rows[0]["peer"] == {
        "step_ms": 4.0, "ratio": 0.5, "ratio_alternating": 0.6, "prefill_tokens_per_s": 1000, "prefill_ratio": 1.5,
    }  # fmt: skip
    assert rows[0]["cycle"]["peer"]["ratio"] == 0.875
    assert "peer" not in rows[1]["cycle"]  # which has no such row count
    found = {gate["gate"]: (gate["worst"], gate["at_rows"], gate["row_counts"], gate["met"]) for gate in gates(rows)}
    assert found == {
        "plain step at 1 row, ms": (2.0, 1, 1, True),
        "the same, alternating, ms": (2.4, 1, 1, False),
        "plain step over the peer's": (0.88, 32, 2, True),
        "plain step over the peer's, alternating": (0.96, 32, 2, False),
        "cycle over the peer's": (0.875, 1, 1, True),
        "cycle over the peer's, alternating": (1.0, 1, 1, False),
        "prompt tokens/s over the peer's": (0.9, 32, 2, False),
    }
    header, lines = loop_table(rows)
    assert all(len(line) == len(header) for line in lines)
    assert [line[:3] for line in lines] == [
        ["1", "plain", "2.00"], ["32", "plain", "8.80"], ["1", "cycle", "7.00"], ["32", "cycle", "20.00"],
    ]  # fmt: skip
    assert lines[1][-5:] == ["10.00", "0.88", "0.96", "2000", "0.90"]
    assert lines[3][-5:] == [""] * 5


@pytest.mark.parametrize(("kernels", "met"), [({1: 30, 4: 12, 32: 11.9}, True), ({1: 9, 4: 11, 32: 12.1}, False)])
def test_gate_of_kernels(kernels, met):
    """Of traced plain steps, from four rows on; a cycle's are not judged."""
    rows = [{"rows": n, **figures(1.0, 1.0, 1), "kernels_per_layer": each} for n, each in kernels.items()]
    rows[1]["cycle"] = figures(1.0, 1.0, 1) | {"kernels_per_layer": 99}
    add_peers(rows, {"plain": peer(0, *((n, 4.0, 1) for n in kernels)), "cycle": peer(3, (4, 4.0, 1))})
    gate = gates(rows)[-1]
    assert (gate["gate"], gate["met"], gate["row_counts"]) == ("kernels of a plain step a layer", met, 2)
    assert (gate["bound"], gate["goal"]) == (12, 12)


def test_gates_without_a_peer():
    """Their bounds are of the peer's shape."""
    assert gates([{"rows": 1, **figures(1.0, 1.0, 1), "cycle": figures(1.0, 1.0, 1)}]) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no result"),
        (json.dumps({"context": 1024}), "is no result"),
        (json.dumps(peer(0, context=512)), "prompts of 512 tokens"),
        (json.dumps(peer(2)), "drafts 2 tokens"),
    ],
)
def test_peers_of_other_sizes_are_refused(tmp_path, content, message):
    file = tmp_path / "peer.json"
    file.write_text(content)
    with pytest.raises(PeerError, match=message):
        read_peers([file], tokens=3, context=1024)


def test_two_peers_of_a_kind_are_refused(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(peer(0)))
    with pytest.raises(PeerError, match="second result"):
        read_peers(files, tokens=3, context=1024)


def test_steps_that_take_turns_have_times_of_their_own():
    log = TimesByRows()
    # The first step only says when the second one's time begins.
    for rows, read in ((4, 10.0), (1, 12.0), (4, 15.0), (1, 18.0), (4, 20.0)):
        plan = SimpleNamespace(decode=[None] * rows)
        log.write(plan, None, StepTimes(0, 0, 0, read, 0), None, None, waiting=0)
    assert log.seconds() == {1: 2.5, 4: 2.5}
    assert [rows for rows, _ in log.steps] == [4, 1, 4, 1, 4]


def test_kernels_of_a_trace():
    def event(start, stop, launch):
        return SimpleNamespace(start_ns=start, duration_ns=stop - start, stats=[("correlation_id", launch)])

    lines = [
        SimpleNamespace(name="Stream #1(Compute)", events=[event(0, 2e6, 1), event(2e6, 3e6, 1), event(4e6, 6e6, 2)]),
        SimpleNamespace(name="Stream #2(MemcpyD2H)", events=[event(0, 9e6, 3)]),
    ]
    found = count_kernels(SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=lines)]), 2)
    assert (found.count, found.launches) == (1.5, 1)
    assert found.seconds == pytest.approx(2.5e-3)


def test_only_measured_buckets_are_compiled():
    decode = [Bucket(0, 0, rows, variant) for rows in (1, 4, 8, 16) for variant in ("lean", "full")]
    prompts = [Bucket(tokens, 8, 16, variant) for tokens in (256, 1024, 8192) for variant in ("lean", "full")]
    table = tuple(decode + prompts)
    plain = [Bucket(0, 0, rows, "lean") for rows in (1, 4, 16)]
    chosen = measured_buckets(table, (1, 3, 16), 1000)
    assert chosen == (*plain, Bucket(1024, 8, 16, "lean"), Bucket(8192, 8, 16, "lean"))
    both = measured_buckets(table, (1, 3, 16), 1000, full=True)
    assert set(both) == {dataclasses.replace(b, variant=v) for b in chosen for v in ("lean", "full")}
    # A single prompt over the budget comes in chunks, and no single prompt is measured without a single row.
    assert measured_buckets(table, (1, 3, 16), 10_000) == (*plain, Bucket(8192, 8, 16, "lean"))
    assert measured_buckets(table, (3, 16), 1000) == (*plain[1:], Bucket(8192, 8, 16, "lean"))


def step_arguments(**given) -> argparse.Namespace:
    options = dict.fromkeys(("tokens", "rows", "context", "loop", "prefill_budget"))
    return argparse.Namespace(**options | {"model": "m", "steps": 24} | given)


def test_sizes_follow_the_device_and_the_draft():
    gpu = choose_sizes(step_arguments(), gpu=True, has_draft=True)
    assert (gpu.rows[-1], gpu.context, gpu.budget, gpu.tokens) == (128, 1024, 8192, 3)
    assert (gpu.loop(0), gpu.loop(3)) == (128, 64)
    assert choose_sizes(step_arguments(), gpu=False, has_draft=False).tokens == 0
    assert choose_sizes(step_arguments(loop=5), gpu=True, has_draft=True).loops == (5, 5)
    with pytest.raises(ConfigError, match="no MTP layer"):
        choose_sizes(step_arguments(tokens=2), gpu=True, has_draft=False)


@pytest.mark.long
@pytest.mark.usefixtures("lean_buckets")
def test_executables_are_kept_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    mesh = mesh_of_one()
    sizes = Sizes(rows=(1,), context=40, steps=4, loops=(6, 6), budget=64, tokens=0)
    weights = draw(random_checkpoint.checkpoint_config("tiny"), mesh, np.dtype(np.float32))
    for earlier in (0, 2):
        engine = build_engine(weights, sizes, 0, mesh, dtype="float32", lean=True)
        assert len(warm_up({"plain": engine})) == 2
        assert executables([engine]) == {"executables": 2, "executables_of_earlier_runs": earlier}


@pytest.mark.long
@pytest.mark.usefixtures("lean_buckets")
def test_cycles_start_again_from_the_same_state():
    """Drafts and lengths are taken back: the same tokens, whichever measurement ran before."""
    hf = random_checkpoint.checkpoint_config("tiny")
    mesh = mesh_of_one()
    sizes = Sizes(rows=(1, 2), context=40, steps=4, loops=(6, 6), budget=64, tokens=3)
    engine = build_engine(draw(hf, mesh, np.dtype(np.float32)), sizes, 3, mesh, dtype="float32", lean=True)
    engine.warm_up()
    load = Load(engine, 2, sizes.context, depth=2)

    def text():
        load.rewind()
        load.select(2)
        for _ in range(6):
            load.step()
        return [list(request.tokens) for request in load.requests]

    first = text()
    assert all(len(tokens) >= sizes.context + 7 for tokens in first)
    with load.running_late(2):
        assert engine.runner.in_flight == 2
    loop = load.time_loop(2, 6)
    assert 1 <= loop.tokens <= 4
    turns = load.times_alternating((1, 2), 6)
    assert set(turns) == {1, 2}
    assert all(span > 0 and host > 0 for span, host in turns.values())
    load.times_ahead((1,), 4)
    assert text() == first
    assert not engine.runner.in_flight


@pytest.mark.long
@pytest.mark.usefixtures("lean_buckets")
def test_steps_and_cycles_beside_a_peer(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    files = [tmp_path / "plain.json", tmp_path / "mtp.json"]
    for file, drafted in zip(files, (0, 3), strict=True):
        file.write_text(json.dumps(peer(drafted, (1, 1e6, 1e-3), (2, 1e-6, 1e12), context=70)))
    out = tmp_path / "step.json"
    options = ["--rows", "1,2", "--context", "70", "--steps", "4", "--loop", "4", "--lean", "--no-expert-count"]
    options += ["--readout-depth", "2"]
    assert main(["step", "--model", str(checkpoint), *options, "--out", str(out), "--peer", *map(str, files)]) == 1
    result = json.loads(out.read_text())
    assert result["compiles_after_warm_up"] == 0
    assert (result["drafted_tokens"], result["readout_depth"]) == (3, 2)
    assert result["max_num_batched_tokens"] == {"plain": 256, "cycle": 256}
    for row in result["rows"]:
        assert row["tokens_a_step"] == 1
        assert 1 <= row["cycle"]["tokens_a_step"] <= 4
        for each in (row, row["cycle"]):
            assert min(each["step_ms"], each["step_alternating_ms"], each["prefill_tokens_per_s"]) > 0
            assert each["peer"]["ratio"] == pytest.approx(each["step_ms"] / each["peer"]["step_ms"], rel=1e-3, abs=1e-4)
        assert row["cycle"]["floor_ms"] > row["floor_ms"]
    for k, each in result["prompt_steps"].items():
        assert 64 < max(f["prompt_tokens"] for f in each) <= result["max_num_batched_tokens"][k]
        assert all(f["step_ms"] > 0 and f["decode_rows"] == 1 for f in each)
    met = {gate["gate"]: (gate["met"], gate["at_rows"]) for gate in result["gates"]}
    assert met["plain step over the peer's"] == met["cycle over the peer's"] == (False, 2)
    assert met["prompt tokens/s over the peer's"] == (False, 2)
    printed = capsys.readouterr().out
    assert "NOT met: cycle over the peer's" in printed
    assert "a layer" in printed
