"""A demo on one machine: prepare a model, serve it, run two client versions against it, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prepare_model import NAME, prepare, say

EXAMPLES = Path(__file__).parent
CACHE = EXAMPLES.parent / ".cache"
NDIF = str(Path(sys.executable).with_name("ndif"))
OLDER = "0.7"
PATIENCE_S = 300


def main() -> None:
    """Prepare, serve, run, stop."""
    environment = {**os.environ, "NDIF_RUNTIMES_DIR": str(CACHE / "runtimes")}
    # Each of them leaves a processor idle.
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(add_older, environment)
        folder = prepare(CACHE / "smollm2-135m")
        adding.result()
    say("Starting a server for the model")
    port = free_port()
    server = subprocess.Popen(
        [NDIF, "local", "start", str(folder), "--name", NAME, "--port", str(port)],
        env=environment,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server)
        # The client uses only the server: the server's hub, and a cache folder of its own.
        client = {
            **os.environ,
            "NDIF_HOST": url,
            "HF_ENDPOINT": f"{url}/hub",
            "HF_HOME": str(CACHE / "client"),
        }
        say("Running a logit lens and an ablation on it, with the client of nnsight 0.8")
        lens = [sys.executable, str(EXAMPLES / "logit_lens.py"), NAME, "--local", str(folder)]
        subprocess.run(lens, check=True, env=client)
        say(f"Running a trace with the client of nnsight {OLDER}")
        subprocess.run(
            [sys.executable, str(EXAMPLES / "older_client.py"), NAME],
            check=True,
            env={**client, "PYTHONPATH": str(CACHE / "runtimes" / OLDER)},
        )
    finally:
        say("Stopping the server")
        server.send_signal(signal.SIGINT)
        server.wait()


def add_older(environment: dict[str, str]) -> None:
    """Install the older nnsight, unless it is there."""
    if not (CACHE / "runtimes" / OLDER).is_dir():
        say(f"Installing nnsight {OLDER}, for older clients, beside the server's own")
        subprocess.run([NDIF, "runtime", "add", OLDER], check=True, env=environment)


def free_port() -> int:
    """Return a free port."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the model is loaded."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit("The server ended before it was ready.")
        try:
            urllib.request.urlopen(f"{url}/connected")
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("The server was not ready in time.")


if __name__ == "__main__":
    main()
