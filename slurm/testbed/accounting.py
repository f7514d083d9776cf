"""slurmdbd and its database on the control host, so that `sacct` works: `up --accounting`.

The database listens on the control host's loopback interface alone, keeps its data in the
cluster's state directory, and knows one user with a password of this cluster's own.
"""

from __future__ import annotations

import secrets
import subprocess

from slurm.testbed.controller import ask, start_daemon
from slurm.testbed.errors import ClusterError
from slurm.testbed.hosts import environment, in_control
from slurm.testbed.packages import program
from slurm.testbed.settings import CONTROL_HOST, DATABASE_PORT, SLURMDBD_PORT, Place, write_whole

INSTALL_LIMIT_S = 60.0
DATABASE = "slurm_acct_db"
USER = "slurm"

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost={control}
DbdPort={dbd_port}
SlurmUser=root
PidFile={run}/slurmdbd.pid
LogFile={logs}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageLoc={database}
StorageUser={user}
StoragePass={password}
"""
FIRST_STATEMENTS = """\
CREATE USER IF NOT EXISTS '{user}'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON {database}.* TO '{user}'@'127.0.0.1';
"""


def start(place: Place) -> None:
    """Returns once slurmdbd answers and knows the cluster; munge must be up, slurmctld not yet."""
    password = secrets.token_hex(16)
    statements = place.slurm_conf.with_name("database.sql")
    write_whole(
        statements,
        FIRST_STATEMENTS.format(user=USER, database=DATABASE, password=password),
        mode=0o600,
    )
    write_whole(
        place.slurm_conf.with_name("slurmdbd.conf"),
        SLURMDBD_CONF.format(
            munge_socket=place.munge_socket,
            control=CONTROL_HOST,
            dbd_port=SLURMDBD_PORT,
            run=place.run,
            logs=place.logs,
            database_port=DATABASE_PORT,
            database=DATABASE,
            user=USER,
            password=password,
        ),
        mode=0o600,  # or slurmdbd refuses it
    )
    _make_database(place)
    socket = place.run / "mariadb.socket"
    mariadbd = [program("mariadbd"), *_own_files(place), f"--socket={socket}"]
    mariadbd += ["--bind-address=127.0.0.1", f"--port={DATABASE_PORT}", "--skip-name-resolve"]
    mariadbd += [f"--pid-file={place.run / 'mariadb.pid'}", f"--init-file={statements}"]
    # Small, and nothing that has to survive the machine.
    mariadbd += ["--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0"]
    start_daemon(place, "mariadbd", mariadbd, socket.is_socket)
    start_daemon(place, "slurmdbd", [program("slurmdbd"), "-D"], lambda: _registers(place))


def _own_files(place: Place) -> list[str]:
    """Nothing of this machine's own database is read or written."""
    return [
        "--no-defaults",
        "--user=root",
        f"--datadir={place.root / 'database'}",
        f"--tmpdir={place.run}",
    ]


def _make_database(place: Place) -> None:
    command = [program("mariadb-install-db"), *_own_files(place), "--skip-test-db"]
    log = place.logs / "mariadb-install-db.out"
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                in_control(place, command),
                env=environment(place),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=INSTALL_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"waited {INSTALL_LIMIT_S:g} s for mariadb-install-db") from None
    if done.returncode != 0:
        last_words = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise ClusterError(f"mariadb-install-db ended with {done.returncode}:\n{last_words}")


def _registers(place: Place) -> bool:
    """Adds the cluster, which slurmctld wants to find; False as long as slurmdbd is not there."""
    return "Adding" in ask(place, "sacctmgr", "--immediate", "add", "cluster", place.name)
