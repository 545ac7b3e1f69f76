"""A Redis server for one test."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.services.packages import need
from tests.services.process import HOST, Process, free_port


class RedisServer:
    """`redis-server` with an append-only file: acknowledged writes survive a restart.

    It serves as a context manager, or between `start` and `stop`; port and data stay the same.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """Set the server up; `options` are options of redis-server, such as `"--maxmemory", "8mb"`."""
        program = need("redis-server", "redis-server")
        self._cli = need("redis-cli", "redis-tools")
        self.port = free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        command = [
            program,
            *("--bind", HOST, "--port", str(self.port)),
            *("--dir", str(folder), "--appendonly", "yes", "--save", "", "--daemonize", "no"),
            # Writes come before their acknowledgement; with "everysec" a slow disk postpones them.
            *("--appendfsync", "no"),
            *options,
        ]
        self._process = Process(command, folder / "redis.log", self._answers, cwd=folder)

    def start(self) -> None:
        """Start the server; return once it has read its data and answers."""
        self._process.start()

    def stop(self) -> None:
        """Shut the server down in order; do nothing if it has ended."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the server with SIGKILL; `start` restarts it."""
        self._process.kill()

    def pause(self) -> None:
        """Pause the server: it accepts connections and answers none of them until `resume`."""
        self._process.pause()

    def resume(self) -> None:
        """Continue the server."""
        self._process.resume()

    def command(self, *words: str) -> str:
        """Return the answer to a command such as `("config", "set", "maxmemory", "1")`."""
        process = subprocess.run(
            [self._cli, "-h", HOST, "-p", str(self.port), *words], capture_output=True, text=True
        )
        return process.stdout.strip() or process.stderr.strip()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        return self.command("ping") == "PONG"
