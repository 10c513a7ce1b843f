"""Command lines as people have them for vLLM and SGLang: `jaxspec serve` starts with them."""

import httpx
import pytest

from tests.serve.server_processes import Process

BODY = {"prompt": "hi", "max_tokens": 4}
LINES = {
    "vLLM": (
        "mock --port 0 -tp 1 --max-model-len 4k --gpu-memory-utilization 0.9 --max_num_seqs 64 --dtype auto "
        "--trust-remote-code --enforce-eager --enable-prefix-caching --enable-chunked-prefill --swap-space 4 "
        "--block-size 16 --disable-log-requests --uvicorn-log-level warning --served-model-name model --seed 1 "
        '--speculative-config {"method":"mtp","num_speculative_tokens":1} --kv-cache-dtype auto -dp 1'
    ),
    "SGLang": (
        "--model-path mock --port 0 --tp 1 --context-length 4096 --mem-fraction-static 0.85 --max-running-requests 64 "
        "--chunked-prefill-size 8192 --trust-remote-code --disable-cuda-graph --attention-backend flashinfer "
        "--served-model-name model --random-seed 1 --log-level info --speculative-algorithm NEXTN --enable-metrics "
        "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --dp-size 1"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("peer", LINES)
def test_a_usual_command_line_starts_the_server(peer, servers):
    process = Process(servers, *LINES[peer].split())
    try:
        for _ in range(2):  # the first one's line in the log, if there is one, comes before the second one's answer
            answer = httpx.post(f"{process.base_url}/v1/completions", json=BODY | {"model": "model"})
            assert answer.status_code == 200
        assert ("jaxspec.access" in process.output) == (peer == "SGLang")  # vLLM's line has a log level for it
        assert "INFO uvicorn" not in process.output
        for option in ("max_num_seqs=64", "served_model_name=model", "num_speculative_tokens=1", "seed=1"):
            assert option in process.output, process.output
        warnings = [line for line in process.output.splitlines() if "has no effect" in line]
        assert len(warnings) == {"vLLM": 6, "SGLang": 4}[peer], warnings
    finally:
        process.kill()


def test_a_file_and_variables_start_the_server(tmp_path, servers):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: mock\nport: 0\nmax-num-seqs: 4\nallowed-origins: ['https://a.example']\napi-key: canary-key\n"
    )
    process = Process(servers, "--config", str(path), JAXSPEC_MAX_NUM_SEQS="5", JAXSPEC_METRICS_PREFIX="vllm")
    try:
        url = process.base_url
        assert f"Options from {path}: port=0, allowed_origins=https://a.example, api_key=***" in process.output
        assert "Options from $JAXSPEC_MAX_NUM_SEQS: max_num_seqs=5" in process.output
        assert "canary-key" not in process.output
        headers = {"authorization": "Bearer canary-key", "origin": "https://a.example"}
        answer = httpx.get(f"{url}/metrics", headers=headers)
        assert "vllm:num_requests_running" in answer.text
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    finally:
        process.kill()
