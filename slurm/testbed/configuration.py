"""The files that Slurm, munge and the nodes read."""

from __future__ import annotations

import os
import secrets
import stat

from liver_hpc.host.files import write_whole
from slurm.testbed.settings import (
    CONTROL_HOST,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    SUBNET,
    ClusterError,
    Place,
    Settings,
    node_address,
)

# Neither systemd nor cgroups are needed. A requeued job waits for its old credential to expire:
# 10 s here, 120 s by default. A step that ends while slurmctld is away says so again after 60 s;
# sooner it must not be called unkillable, which drains its node.
SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={control}({subnet}.1)
SlurmctldPort={slurmctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge_socket},cred_expire=10
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait={kill_wait_s}
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=30
InactiveLimit=0
ReturnToService=2
MessageTimeout=10
UnkillableStepTimeout=120
"""

PARTITIONS = """\
PartitionName=stable Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF \
OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP
PartitionName=preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} \
OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP
"""


def slurm_conf(settings: Settings, place: Place) -> str:
    head = SLURM_CONF.format(
        name=settings.name,
        control=CONTROL_HOST,
        subnet=SUBNET,
        slurmctld_port=SLURMCTLD_PORT,
        munge_socket=place.munge_socket,
        run=place.run,
        root=place.root,
        logs=place.logs,
        kill_wait_s=settings.kill_wait_s,
        slurmd_timeout_s=settings.slurmd_timeout_s,
    )
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    nodes = "".join(
        f"NodeName={node} NodeAddr={node_address(node)} Port={SLURMD_PORT} CPUs={settings.cpus} "
        f"CoresPerSocket={settings.cpus} RealMemory={settings.memory_mb}{gres}\n"
        for node in settings.node_names
    )
    return head + nodes + PARTITIONS.format(grace_s=settings.grace_s)


def hosts(settings: Settings) -> str:
    lines = ["127.0.0.1 localhost", f"{SUBNET}.1 {CONTROL_HOST}"]
    lines += [f"{node_address(node)} {node}" for node in settings.node_names]
    return "\n".join(lines) + "\n"


def write_all(settings: Settings, place: Place) -> None:
    etc = place.slurm_conf.parent
    write_whole(place.slurm_conf, slurm_conf(settings, place))
    write_whole(place.hosts, hosts(settings))
    gres = "AutoDetect=off\n"
    if settings.gpus:
        gres += f"Name=gpu File={place.devices}/gpu[0-{settings.gpus - 1}]\n"
    write_whole(etc / "gres.conf", gres)
    # Named, or slurmd looks for what systemd mounts. Nothing here uses cgroups.
    write_whole(etc / "cgroup.conf", "CgroupPlugin=cgroup/v1\n")
    write_whole(place.munge_key, secrets.token_hex(512), mode=0o400)
    (place.root / "state").mkdir(exist_ok=True)
    for index in range(settings.gpus):
        # Slurm counts character devices; these are /dev/null under other names.
        try:
            os.mknod(place.devices / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            raise ClusterError("devices may not be made here (CAP_MKNOD); try --gpus 0") from None
