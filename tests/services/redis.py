"""A Redis server of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.services.packages import need
from tests.services.process import HOST, Process, free_port


class RedisServer:
    """`redis-server` with an append-only file: what it has acknowledged is there after a restart.

    It serves as a context manager, or between `start` and `stop`; port and data stay the same.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` are redis-server's own, as `"--maxmemory", "8mb"`."""
        program = need("redis-server", "redis-server")
        self._cli = need("redis-cli", "redis-tools")
        self.port = free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        command = [
            program,
            *("--bind", HOST, "--port", str(self.port)),
            *("--dir", str(folder), "--appendonly", "yes", "--save", "", "--daemonize", "no"),
            # Written before it is acknowledged: with "everysec" a slow disk postpones that.
            *("--appendfsync", "no"),
            *options,
        ]
        self._process = Process(command, folder / "redis.log", self._answers, cwd=folder)

    def start(self) -> None:
        """Start it, and return once it has read its data and answers."""
        self._process.start()

    def stop(self) -> None:
        """End it in good order; nothing if it has ended."""
        self._process.stop()

    def kill(self) -> None:
        """End it at once, as SIGKILL does; `start` brings it back."""
        self._process.kill()

    def pause(self) -> None:
        """Let it take connections and answer nothing, until `resume`."""
        self._process.pause()

    def resume(self) -> None:
        """Continue the server."""
        self._process.resume()

    def command(self, *words: str) -> str:
        """The answer to a command such as `("config", "set", "maxmemory", "1")`."""
        done = subprocess.run(
            [self._cli, "-h", HOST, "-p", str(self.port), *words], capture_output=True, text=True
        )
        return done.stdout.strip() or done.stderr.strip()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        return self.command("ping") == "PONG"
