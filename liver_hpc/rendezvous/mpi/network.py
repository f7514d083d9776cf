"""Where the rendezvous is, and what MPI goes by on the way there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from liver_hpc.errors import MeetingError
from liver_hpc.host.interfaces import interface_towards, is_loopback

_NETMOD = "MPIR_CVAR_CH4_NETMOD"
_OFI_INTERFACE = "FI_TCP_IFACE"
_UCX_INTERFACE = "UCX_NET_DEVICES"


@dataclass(frozen=True)
class MpiNetwork:
    """host: where the rendezvous listens. interface, netmod: what MPI goes by, where the run file
    names it; by default the interface that leads to `host`, and ofi."""

    host: str = "127.0.0.1"
    interface: str | None = None
    netmod: str | None = None

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What tells MPICH, libfabric and UCX: the run file before the environment before all else.

        With ofi, MPI then listens on that interface alone. What other libraries are told, too, as
        FI_PROVIDER for NCCL's plugin, is not taken from the environment.
        """
        # ofi reports a dead peer where ucx crashes; tcp is there on every machine, and fast enough.
        chosen = {_NETMOD: "ofi", "FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self"}
        chosen[_UCX_INTERFACE] = "all"
        # UCX crashes over the loopback interface when it is told to use it alone.
        on_loopback = is_loopback(self.host)
        names = (_OFI_INTERFACE,) if on_loopback else (_OFI_INTERFACE, _UCX_INTERFACE)
        found = interface_towards(self.host)
        if found is not None:
            chosen |= dict.fromkeys(names, found)
        known = (_NETMOD, _OFI_INTERFACE)
        chosen |= {name: environment[name] for name in known if name in environment}
        if self.interface is not None:
            chosen |= dict.fromkeys(names, self.interface)
        return chosen | ({} if self.netmod is None else {_NETMOD: self.netmod})

    def decided(self, environment: Mapping[str, str]) -> MpiNetwork:
        """The same with the netmod that is taken here, and must be by whoever comes."""
        return replace(self, netmod=self.variables(environment)[_NETMOD])


class RendezvousPlace(BaseModel):
    """Where joiners come to: they queue at this port, and learn MPI's port name in their turn."""

    model_config = ConfigDict(frozen=True)

    network: MpiNetwork
    port: int

    @classmethod
    def read(cls, run_directory: Path) -> RendezvousPlace | None:
        """The present rendezvous of a run; None while there is none."""
        try:
            return cls.model_validate_json(place_file(run_directory).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise MeetingError(f"{place_file(run_directory)}: not a rendezvous") from error


def place_file(run_directory: Path) -> Path:
    return run_directory / "rendezvous.json"
