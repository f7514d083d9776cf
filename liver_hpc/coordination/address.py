"""The address on which the coordinator listens."""

from __future__ import annotations

import fcntl
import socket
import struct

from liver_hpc.errors import ConfigError

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def control_address(interface: str | None) -> str:
    """The IPv4 address of a network interface; without one, of this machine alone.

    Raises ConfigError that lists the interfaces when this one has no address.
    """
    if interface is None:
        return LOOPBACK
    request = struct.pack("256s", interface.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"network.interface: {interface!r} has no IPv4 address ({error.strerror}); "
                f"interfaces are {names}"
            ) from error
    # struct ifreq: 16 bytes of name, then a sockaddr_in with the address in its bytes 4..8
    return socket.inet_ntoa(answer[20:24])
