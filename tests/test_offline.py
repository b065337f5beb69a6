"""The guard that keeps tests off the network, here and in child processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import offline
import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_a_connection_out_is_refused(host: str) -> None:
    with pytest.raises(offline.NetworkRefusedError, match=host):
        socket.create_connection((host, 80), timeout=1)
    assert offline.ATTEMPTS.pop() == host


def test_loopback_works() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_child_processes_are_offline_too() -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NetworkRefusedError" in done.stderr
