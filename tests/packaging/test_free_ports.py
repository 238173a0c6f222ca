from __future__ import annotations

import socket
from pathlib import Path

import free_ports
import pytest


@pytest.mark.parametrize(
    ("system", "ours"),
    [
        ("32768\t60999", [*range(10_000, 32_768), *range(61_000, 65_536)]),
        ("1024\t65000", range(65_001, 65_536)),
        # Then the system chooses.
        ("1024\t65535", range(1024, 65_536)),
    ],
)
def test_a_port_is_outside_of_the_range_of_the_system_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, ours: list[int]
) -> None:
    monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
    free_ports._RANGE.write_text(f"{system}\n")
    for _ in range(20):
        assert free_ports.free_port() in ours


def test_the_system_is_asked_where_all_others_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(free_ports, "_RANGE", tmp_path / "range")
        monkeypatch.setattr(free_ports, "_LOWEST", port)
        monkeypatch.setattr(free_ports, "_HIGHEST", port)
        free_ports._RANGE.write_text("1 2\n")
        assert free_ports.free_port() != port
