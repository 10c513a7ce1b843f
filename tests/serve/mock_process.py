"""A server with the mock engine as a process of its own, whose memory can be watched: prints its port."""

import uvicorn

from serve.server import bind, http_config
from serve.service import ServerSettings, Service
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served


def main() -> None:
    service = Service(ServerSettings("mock"), lambda _progress: served(MockEngine(), byte_tokenizer()))
    sock = bind("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(http_config(service)).run([sock])


if __name__ == "__main__":
    main()
