"""Serve packages by Triton on loopback behind a proxy, until Ctrl-C or SIGTERM.

python examples/serving/serve.py --models runs/serving/models
"""

import argparse
import signal
from pathlib import Path

from proxy import proxy
from triton_server import find_server, triton_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("runs/serving/models"))
    parser.add_argument("--triton", type=Path, default=Path(".cache/triton"))
    parser.add_argument("--backends", type=Path, default=Path("build/predictor/backends"))
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program = find_server(options.triton)
    ports = 0, options.grpc_port
    try:
        with (
            triton_server(program, options.models, options.backends, ports=ports) as server,
            proxy(options.http_port, server.http_port) as http_port,
        ):
            client = f"python {Path(__file__).with_name('client.py')} --user 405"
            print(
                f"\nReady: HTTP at port {http_port}, gRPC at {server.grpc_port}. Score the "
                f"films of a user:\n  {client} --port {http_port}\n"
                f"  {client} --port {server.grpc_port} --grpc\nStop the server by Ctrl-C.",
                flush=True,
            )
            server.process.wait()
    except KeyboardInterrupt:
        print("The server has stopped.")


if __name__ == "__main__":
    main()
