"""This machine's network interfaces: their IPv4 addresses, and which one leads where."""

from __future__ import annotations

import ipaddress
import socket

import psutil

SOMEWHERE = "203.0.113.1"
"""An address that nobody has (RFC 5737): the way to it is the default route."""

_DISCARD_PORT = 9


def interface_addresses() -> dict[str, str]:
    """Interfaces that are up and have an IPv4 address, each with its first one."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [entry.address for entry in addresses if entry.family == socket.AF_INET]
        if ipv4 and name in up:
            found[name] = ipv4[0]
    return found


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The interface on the way to `host`; None when no address says which it is."""
    try:
        return interface_holding(address_towards(host), interface_addresses())
    except OSError:
        return None


def interface_holding(address: str, interfaces: dict[str, str]) -> str | None:
    """The interface that has an address; None where there is none."""
    return next((name for name, held in interfaces.items() if held == address), None)


def hostname_addresses(host: str) -> list[str]:
    """IPv4 addresses that a hostname resolves to; without those that only lead back here, or to the
    next device, as to a node's own BMC: of several getaddrinfo says these first."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return [str(one) for one in addresses if not (one.is_loopback or one.is_link_local)]


def is_loopback(host: str) -> bool:
    """Whether a host, by address or name, is this machine as only itself sees it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
