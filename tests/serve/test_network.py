"""HTTPS, and a server behind a path of a proxy."""

import contextlib
import os
import ssl
import subprocess
import time

import httpx
import pytest

from serve import cli
from tests.serve.client_checks import check_error, client
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect
from tests.serve.server_processes import Process

BODY = {"prompt": "hi", "max_tokens": 4}


@pytest.fixture(scope="module")
def pem(tmp_path_factory) -> dict[str, str]:
    """A certificate that signs itself, its key, and the key with a password."""
    folder = tmp_path_factory.mktemp("tls")
    names = {name: str(folder / f"{name}.pem") for name in ("cert", "key", "locked")}
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*new, "-nodes", "-keyout", names["key"], "-out", names["cert"], *subject], check=True, capture_output=True
    )
    lock = ["openssl", "ec", "-aes256", "-passout", "pass:secret-password"]
    subprocess.run([*lock, "-in", names["key"], "-out", names["locked"]], check=True, capture_output=True)
    os.chmod(names["key"], 0o600)
    return names


@pytest.mark.slow
def test_https(pem, servers):
    process = Process(
        servers, "mock", "--port", "0", "--ssl-certfile", pem["cert"], "--ssl-keyfile", pem["locked"],
        JAXSPEC_SSL_KEYFILE_PASSWORD="secret-password",
    )  # fmt: skip
    try:
        url = process.base_url
        assert url.startswith("https://127.0.0.1:")
        answer = httpx.post(f"{url}/v1/completions", json=BODY, verify=ssl.create_default_context(cafile=pem["cert"]))
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")
        assert "ssl_keyfile_password=***" in process.output
        assert "secret-password" not in process.output
    finally:
        process.kill()


@pytest.mark.slow
def test_half_open_handshakes_do_not_starve_a_server_with_few_descriptors(pem, servers):
    """Nor do as many as come at once: each is looked at before many more are accepted."""
    process = Process(
        servers, "mock", "--port", "0", "--ssl-certfile", pem["cert"], "--ssl-keyfile", pem["key"], descriptors=256
    )
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        url = process.base_url
        for _ in range(400):
            stack.enter_context(contextlib.closing(connect(url)))
        process.wait_for("256 descriptors): others are refused")
        time.sleep(1.1)  # from then on they make room for others
        verify = ssl.create_default_context(cafile=pem["cert"])
        assert httpx.post(f"{url}/v1/completions", json=BODY, verify=verify, timeout=60).status_code == 200
        assert process.output.count("others are refused") <= 5
        assert "out of system resource" not in process.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-keyfile", "{key}"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/no/file"], "cannot use --ssl-certfile /no/file: No such file or directory"),
        (["--ssl-certfile", "{key}"], "no certificate with its key in PEM format"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{locked}"], "or the key needs --ssl-keyfile-password"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}", "--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs"),
        (
            ["--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}", "--ssl-ca-certs", "{key}"],
            "no certificates in PEM format",
        ),
        (["--root-path", "api"], "--root-path must be a path such as /api, got 'api'"),
        (["--root-path", "/a b"], "--root-path must be a path such as /api, got '/a b'"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_loads(capsys, pem, flags, message):
    assert cli.main(["serve", *(flag.format(**pem) for flag in flags)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("path", ["", "/api"])
def test_a_proxy_may_strip_the_path_or_not(start_server, path):
    server = start_server(served(MockEngine(), byte_tokenizer()), root_path="/api", api_keys=("key",))
    url = server.base_url + path
    assert httpx.get(f"{url}/health").status_code == 200
    check_error(httpx.get(f"{url}/v1/models"), 401, None, "invalid_api_key")
    headers = {"authorization": "Bearer key"}
    assert httpx.get(f"{url}/openapi.json", headers=headers).json()["servers"] == [{"url": "/api"}]
    assert client(url, api_key="key").completions.create(model="mock", prompt="hi", max_tokens=4).choices


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/api/health/../v1/models", "/apihealth", "/api", "/api//", "/health/api", "/api/api/health"]
)
def test_a_path_that_looks_open_is_not(start_server, path):
    server = start_server(served(MockEngine(), byte_tokenizer()), root_path="/api", api_keys=("key",))
    check_error(httpx.get(server.base_url + path), 401, None, "invalid_api_key")
