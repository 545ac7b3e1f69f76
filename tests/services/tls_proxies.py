"""Caddy and nginx in front of a server, configured as in docs/operating.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.services.packages import need
from tests.services.process import Process, accepts

DOCUMENT = Path(__file__).parents[2] / "docs" / "operating.md"
NAME = "ndif.example.org"
"""Server name in the document."""
_SERVER = "127.0.0.1:8001"

_CADDY = """\
{{
    admin off
    http_port {http_port}
    https_port {port}
    local_certs
    skip_install_trust
    auto_https disable_redirects
    storage file_system {folder}/caddy
    pki {{
        ca local {{
            root {{
                cert {folder}/ca.pem
                key {folder}/ca.key
            }}
        }}
    }}
}}
{text}
"""
_NGINX = """\
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-1;
    uwsgi_temp_path {folder}/nginx-2;
    scgi_temp_path {folder}/nginx-3;
{text}
}}
"""


def documented(language: str) -> str:
    """Return the document's only block in a language."""
    (text,) = re.findall(
        rf"^```{language}\n(.+?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(text)


def make_authority(folder: Path) -> Path:
    """Make a certificate authority for the server's name; return the file that clients trust."""
    openssl = need("openssl", "openssl")

    def run(*arguments: str) -> None:
        command = [openssl, *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run(
        "req",
        "-x509",
        *key,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=tests",
        "-days",
        "2",
    )
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", f"/CN={NAME}")
    (folder / "names").write_text(f"subjectAltName=DNS:{NAME}")
    run(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2"),
        *("-CAcreateserial", "-extfile", "names", "-out", "server.pem"),
    )
    return folder / "ca.pem"


def caddy(folder: Path, port: int, http_port: int, server: str) -> Process:
    """Return Caddy on `port` in front of `server`; its authority is the one in `folder`."""
    program = need("caddy", "caddy")
    text = _replaced(documented("caddyfile"), {_SERVER: server})
    file = folder / "Caddyfile"
    file.write_text(_CADDY.format(folder=folder, port=port, http_port=http_port, text=text))
    command = [program, "run", "--config", str(file), "--adapter", "caddyfile"]
    return Process(command, folder / "caddy.log", lambda: accepts(port), cwd=folder)


def nginx(folder: Path, port: int, server: str, *, keeps_host: bool) -> Process:
    """Return nginx on `port` in front of `server`; without `keeps_host`, it sets the Host header itself."""
    program = need("nginx", "nginx-light")
    replaced = {
        _SERVER: server,
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        f"/etc/ssl/certs/{NAME}.pem": f"{folder}/server.pem",
        f"/etc/ssl/private/{NAME}.key": f"{folder}/server.key",
    }
    if not keeps_host:
        replaced["proxy_set_header Host $http_host;"] = ""
    text = _replaced(documented("nginx"), replaced)
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, text=text))
    command = [program, "-c", str(file), "-p", str(folder)]
    return Process(command, folder / "nginx.log", lambda: accepts(port), cwd=folder)


def _replaced(text: str, parts: dict[str, str]) -> str:
    for part, other in parts.items():
        assert text.count(part) == 1, f"{part} in\n{text}"
        text = text.replace(part, other)
    return text
