"""A PostgreSQL server for one test."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

from tests.services.packages import go_without, need
from tests.services.process import HOST, Process, free_port

_ADMIN = "postgres"
"""A system user other than root: PostgreSQL does not run as root."""
USER, PASSWORD = "ndif", "p@ss/w%rd:é"


class PostgresServer:
    """`postgres` on loopback, with a password.

    It serves as a context manager. Within it, `stop` and `start` make it unavailable and available again at
    the same address, with its data.
    """

    def __init__(self) -> None:
        need("pg_ctlcluster", "postgresql")
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not folders:
            go_without("PostgreSQL is missing: apt-get install postgresql")
        self.programs = folders[-1]
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="ndif-postgres-"))
        self._folder.chmod(0o755)
        self._names = (f"test{number}" for number in itertools.count())
        self._data = self._folder / "data"
        if os.geteuid() == 0:
            shutil.chown(self._folder, _ADMIN, _ADMIN)
        command = [
            str(self.programs / "postgres"),
            *("-D", str(self._data), "-p", str(self.port), "-k", str(self._folder)),
            *("-c", f"listen_addresses={HOST}", "-c", "max_connections=200", "-c", "fsync=off"),
        ]
        log = self._folder / "postgres.log"
        # SIGTERM would wait for clients to leave.
        self._process = Process(
            command, log, self._answers, cwd=self._folder, user=_ADMIN, stopped_by=signal.SIGINT
        )

    def start(self) -> None:
        """Start the server; return once it answers."""
        self._process.start()

    def stop(self) -> None:
        """Shut the server down in order, whatever connections exist."""
        self._process.stop()

    def pause(self) -> None:
        """Pause the server: it accepts connections and answers none of them until `resume`."""
        self._process.pause()

    def resume(self) -> None:
        """Continue the server."""
        self._process.resume()

    def database(self) -> str:
        """Make a database; return its URL."""
        name = next(self._names)
        self.run("createdb", name)
        return self.url(name)

    def url(self, database: str, user: str = USER, password: str = PASSWORD) -> str:
        """Return the URL of a database."""
        return f"postgresql://{user}:{quote(password, safe='')}@{HOST}:{self.port}/{database}"

    def sql(self, url: str, statements: str) -> str:
        """Return the output of statements, without headings."""
        return self.run("psql", "-v", "ON_ERROR_STOP=1", "-qAt", "-c", statements, url)

    def run(self, program: str, *arguments: str) -> str:
        """Return the output of one of the server's programs."""
        process = subprocess.run(
            [self.programs / program, *arguments],
            env={**os.environ, "PGHOST": HOST, "PGPORT": str(self.port), "PGUSER": USER}
            | {"PGPASSWORD": PASSWORD},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def __enter__(self) -> PostgresServer:
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        as_admin = ["runuser", "-u", _ADMIN, "--"] if os.geteuid() == 0 else []
        subprocess.run(
            [
                *as_admin,
                str(self.programs / "initdb"),
                *("-D", str(self._data), "-U", USER, "--pwfile", str(secret)),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=self._folder,
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        process = subprocess.run(
            [self.programs / "pg_isready", "-q", "-h", HOST, "-p", str(self.port)]
        )
        return process.returncode == 0
