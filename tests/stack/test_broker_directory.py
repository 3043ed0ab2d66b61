"""A data directory has one broker at a time and remembers its ports."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from stack.broker.directory import _java_property, claim, reserve, settle_ports


def test_a_claimed_directory_is_refused_until_it_is_freed(tmp_path: Path) -> None:
    holder = claim(tmp_path)
    with pytest.raises(ConfigError, match="in use by a running broker"):
        claim(tmp_path)
    os.close(holder)
    os.close(claim(tmp_path))


def test_the_ports_of_the_first_start_are_kept(tmp_path: Path) -> None:
    first = reserve(tmp_path, 0)
    assert first.broker != first.controller
    assert reserve(tmp_path, 0) == first


def test_another_port_replaces_the_remembered_one(tmp_path: Path) -> None:
    first = settle_ports(tmp_path, 0)
    other = settle_ports(tmp_path, first.controller)
    assert other.broker == first.controller
    assert other.controller != other.broker
    assert settle_ports(tmp_path, 0) == other


def test_free_ports_lie_below_those_that_clients_are_given(tmp_path: Path) -> None:
    ports = settle_ports(tmp_path, 0)
    assert ports.broker < 32_768
    assert ports.controller < 32_768


def test_a_port_that_another_program_has_is_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} .* in use"):
            settle_ports(tmp_path, port)


def test_a_controller_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path) -> None:
    first = settle_ports(tmp_path, 0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first.controller))
        other.listen()
        second = settle_ports(tmp_path, 0)
    assert second.broker == first.broker
    assert second.controller != first.controller


@pytest.mark.parametrize("text", ["", "{", "[]", '{"broker": 1}'])
def test_a_damaged_memory_of_ports_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    with pytest.raises(ConfigError, match=r"ports\.json is damaged"):
        settle_ports(tmp_path, 0)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_what_is_no_port_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="is not a port"):
        settle_ports(tmp_path, port)


def test_a_path_that_kafka_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comma"):
        claim(tmp_path / "a,b")
    assert not (tmp_path / "a,b").exists()


@pytest.mark.parametrize(
    ("value", "escaped"),
    [("/a b", "/a b"), ("/a\\b", "/a\\\\b"), ("/é", "/\\u00e9"), ("/🐎", "/\\ud83d\\udc0e")],
)
def test_java_reads_a_path_as_it_was_written(value: str, escaped: str) -> None:
    assert _java_property(value) == escaped
