"""Sixteen properties of a reliable server (R1 to R16), and the tests that show them.

Tests without a file are in this one; files are under tests/.

  - R1: a streaming client that goes away takes its request out of the engine, and nothing is lost
          serve/test_disconnect.py::test_a_disconnect_drops_the_request
          serve/test_disconnect.py::test_many_aborts_leave_nothing_behind
          engine/test_scheduler.py::test_abort_in_every_state_gives_everything_back
          serve/test_soak.py::test_soak
  - R2: so does one that does not stream: while it waits, in a chunk of its prompt, before the engine took it, in a tokeniser
          serve/test_disconnect.py::test_a_disconnect_drops_the_request
          serve/test_disconnect.py::test_a_disconnect_before_the_engine_took_the_request
          serve/test_text_pool.py::test_nobody_waits_nothing_is_tokenised
          engine/test_scheduler.py::test_abort_in_every_state_gives_everything_back
  - R3: the queue is bounded: refusals cost little, come before tokenisation, say when to come back; those inside are served
          serve/test_admission.py::test_overload
          serve/test_admission.py::test_a_refusal_comes_before_tokenisation
          serve/test_admission.py::test_retry_after_follows_the_queue
          test_under_overload_the_queue_is_bounded_and_refusals_cost_little
  - R4: SIGTERM drains, within its timeout whatever goes on; a second signal forces
          serve/test_process.py::test_sigterm_finishes_what_runs_and_lets_nobody_in
          serve/test_process.py::test_what_does_not_finish_in_time_gets_an_error
          serve/test_process.py::test_nothing_holds_the_end_up
  - R5: deadlines of a request and of its wait: 504, not repeated, out of the engine
          serve/test_deadlines.py::test_a_request_that_takes_too_long
          serve/test_deadlines.py::test_a_request_that_never_starts
          serve/test_deadlines.py::test_the_client_library_does_not_try_again
  - R6: a dead or stuck engine is not healthy, everybody is told, the process ends; long prompts and compilation are not stuck
          serve/test_failure.py::test_engine_death
          serve/test_failure.py::test_a_stuck_step_is_the_end
          serve/test_failure.py::test_what_takes_long_but_is_not_stuck
          serve/test_process.py::test_engine_death_ends_the_process
          serve/test_process.py::test_a_stuck_step_ends_the_process
  - R7: the port answers before the model is loaded, and says that it is not ready
          serve/test_failure.py::test_while_loading_the_port_answers
          serve/test_process.py::test_the_port_is_taken_before_the_model_loads
  - R8: without free KV pages requests are preempted, and their text stays the same
          engine/test_engine.py::test_preemption_changes_nothing
          engine/test_speculation.py::test_preemption_changes_nothing
          engine/test_scheduler.py::test_preemption_at_every_step
  - R9: the largest step fits: it is run, and measured, before the pool of pages is made
          engine/test_pool_size.py::test_tables_of_buckets
          engine/test_pool_size.py::test_pages_get_what_the_largest_steps_leave
  - R10: NaN ends its own request, with an error, a line in the log and a count; nobody else sees it
          engine/test_engine.py::test_a_nan_row_ends_its_own_request_only
          serve/test_failure.py::test_one_failed_request_touches_no_other
          serve/test_failure.py::test_a_nan_is_logged_and_counted
  - R11: ids outside the vocabulary never leave the sampler
          engine/test_speculation_properties.py::test_outputs_keep_their_contract
  - R12: no request ends the engine
          serve/test_failure.py::test_a_bug_in_validation_fails_its_request_alone
          serve/test_failure.py::test_all_prompts_of_a_call_are_accepted_or_none
          serve/test_connections.py::test_bad_http_is_refused_with_openais_body
          serve/test_soak.py::test_soak
  - R13: nothing that takes long runs on the event loop
          serve/test_text_pool.py::test_long_texts_do_not_delay_short_ones
          test_health_answers_while_long_texts_are_tokenised
  - R14: the prefix cache goes by content, and by salt
          engine/test_mixed_steps.py::test_a_follow_up_turn_equals_an_uncached_one
          serve/test_demo_server.py::test_prompts_that_begin_alike_share_pages_under_one_salt
  - R15: the log is bounded, and its lines have request ids
          serve/test_logs.py::test_aborts_are_a_line_each
          serve/test_logs.py::test_what_a_client_names_is_cut
          serve/test_routes.py::test_the_log_has_ids_and_no_prompts
  - R16: slow readers hold bounded memory, each and together, and slow nobody
          serve/test_disconnect.py::test_a_slow_reader_loses_nothing_and_slows_nobody
          serve/test_connections.py::test_streams_that_nobody_reads_are_bounded_each
          serve/test_connections.py::test_streams_that_nobody_reads_are_bounded_together
          serve/test_connections.py::test_a_client_that_takes_no_output_is_closed
"""

import collections
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.client_checks import check_error
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, post

BODY = {"prompt": "hi", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def test_the_table_names_tests_that_exist():
    tests = Path(__file__).parents[1]
    rows = re.split(r"^  - ", str(__doc__), flags=re.MULTILINE)[1:]
    assert [row.partition(":")[0] for row in rows] == [f"R{i}" for i in range(1, 17)]
    for row in rows:
        named = re.findall(r"^ {10}(?:(\S+\.py)::)?(test_\w+)", row, re.MULTILINE)
        assert named, row
        for file, test in named:
            source = (tests / file if file else Path(__file__)).read_text()
            assert f"def {test}(" in source, f"{file}::{test}"


@pytest.mark.long
@pytest.mark.usefixtures("no_garbage_collection")
def test_under_overload_the_queue_is_bounded_and_refusals_cost_little(start_server):
    """Ten times as much as fits, for a while."""
    engine = MockEngine(step_seconds=0.002, max_running=4)
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=8)

    def ask(_: int) -> list[int]:
        codes = []
        with httpx.Client(base_url=server.base_url, timeout=30) as http:
            for _ in range(12):
                response = http.post("/v1/completions", json=BODY)
                codes.append(response.status_code)
                if codes[-1] != 200:
                    check_error(response, 429, None, "rate_limit_exceeded")
                    assert int(response.headers["retry-after"]) >= 1
        return codes

    with ThreadPoolExecutor(40) as pool:
        codes = collections.Counter(code for of_one in pool.map(ask, range(40)) for code in of_one)
    assert codes[429] > 100
    assert codes[200] > 20
    # A refusal by itself, without forty clients on the same cores.
    engine.gate.clear()
    waiting = [connect(server.base_url) for _ in range(8)]
    for connection in waiting:
        connection.sendall(post(BODY, "/v1/completions"))
    server.wait_until(lambda: server.service.admission.num_queued == 8)
    costs = []
    with httpx.Client(base_url=server.base_url) as http:
        for _ in range(100):
            worked = server.loop_seconds()
            assert http.post("/v1/completions", json=BODY | {"prompt": "x" * 400}).status_code == 429
            costs.append(server.loop_seconds() - worked)
    # The engine stands still, so a refusal waits for nothing but the machine; what it costs is no matter of load.
    assert max(costs) < 0.05
    engine.gate.set()
    for connection in waiting:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage_collection")
def test_health_answers_while_long_texts_are_tokenised(start_server):
    server = start_server(served(MockEngine(max_model_len=2**23), byte_tokenizer()))
    text = "def f(x):\n    return x\n" * 40_000  # almost a megabyte, and as many tokens
    connections = [connect(server.base_url) for _ in range(4)]
    for connection in connections:
        connection.sendall(post(BODY | {"prompt": text, "max_tokens": 1}))
    server.wait_until(lambda: server.service.texts.num_bytes > 3 * len(text))
    costs = []
    with httpx.Client(base_url=server.base_url) as http:
        while server.service.texts.num_bytes:
            worked = server.loop_seconds()
            assert http.get("/health").status_code == 200
            time.sleep(0.005)
            costs.append(server.loop_seconds() - worked)
    assert len(costs) > 20
    # The event loop itself never works for long; `bench health` measures the times on a quiet machine.
    assert statistics.quantiles(costs, n=100)[-1] < 0.05
    for connection in connections:
        connection.close()
    server.wait_until(lambda: server.service.in_flight == 0)
