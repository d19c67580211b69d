"""A Ray cluster of one's own on this machine, or the road to one that a Moetis cluster runs on already.

Plain `ray.init()` joins whatever cluster it finds. Here everything is explicit: a new cluster gets its own temp dir and
its own token, listens on loopback, and ends with the process that started it, even one that is killed.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from cluster.watchdog import watched
from placement.errors import ConfigError, MoetisError
from placement.files import write_whole

NAMESPACE = "moetis"
SERVICE_NAME = "placement-service"
CONTACT_FILE = "cluster.json"
CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1"
# With several nodes ruled out, Ray takes the loopback address as it is and listens nowhere else; left to itself on
# Linux it replaces 127.0.0.1 by the machine's outer address and listens on all.
_SINGLE_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_OWN_VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Whoever asks Ray for something after its end would be given a new cluster, dashboard and all, that nobody looks after.
auto_init_hook.enable_auto_connect = False
# Ray starts its workers at niceness 15, so that anything else on the machine would go before tokens.
_TOKENS_FIRST = {"RAY_worker_niceness": "0"}
# A cluster of one's own has one head, which does not come back: nobody needs to look for it for a minute.
_HEAD_IS_LOST_SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
_LONGEST_TEMP_DIR = 20
HEAD_ENDS_S, LOOK_S = 0.5, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How another process reaches a running cluster: written to run_dir/cluster.json."""

    name: str
    address: str
    namespace: str
    token_path: str | None
    pid: int


@contextmanager
def local_cluster(*, name: str, num_cpus: int, object_store_mb: int) -> Iterator[Contact]:
    """Start a Ray cluster on this machine; it is gone, temp dir and all, when the context ends."""
    folder = _short_folder()
    token_path = folder / "token"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32))
    variables = (
        _OWN_VARIABLES | _SINGLE_NODE | _TOKENS_FIRST | _HEAD_IS_LOST_SOON | {"RAY_AUTH_TOKEN_PATH": str(token_path)}
    )
    try:
        with watched(folder, Path(ray.__file__).parent), _environment(variables):
            context = _start(folder, num_cpus, object_store_mb)
            try:
                yield Contact(
                    name=name,
                    address=context.address_info["gcs_address"],
                    namespace=NAMESPACE,
                    token_path=str(token_path),
                    pid=os.getpid(),
                )
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, num_cpus: int, object_store_mb: int) -> Any:
    try:
        return _init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=object_store_mb * 10**6,
            _temp_dir=str(folder),
            _node_ip_address=_LOOPBACK,
        )
    except (OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise MoetisError(f"Ray could not be started: {str(error).splitlines()[0]}") from error


def _init(**arguments: Any) -> Any:
    """ray.init, which puts a handler of its own, one that calls sys.exit, in the place of ours: ours comes back."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return ray.init(**arguments)
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def _short_folder() -> Path:
    """A temp dir of one's own. Ray puts sockets deep in it, whose whole path may have 107 bytes, so that a long TMPDIR
    is passed over for /tmp."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="moetis-", dir=base if len(base) <= _LONGEST_TEMP_DIR else "/tmp"))


@contextmanager
def joined_cluster(address: str, token_path: str | None = None) -> Iterator[Contact]:
    """Connect to a running Ray cluster, which goes on when the context ends. Raises ConfigError if it isn't there."""
    _check_reachable(address)
    variables = _OWN_VARIABLES | {"RAY_AUTH_TOKEN_PATH": token_path} if token_path else {}
    if address.startswith(_LOOPBACK):
        variables |= _SINGLE_NODE
    with _environment(variables):
        try:
            _init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster answers at '{address}': {str(error).splitlines()[0]}") from error
        try:
            yield Contact(
                name=NAMESPACE,
                # 'auto' means something here and now only.
                address=ray.get_runtime_context().gcs_address,
                namespace=NAMESPACE,
                token_path=token_path or os.environ.get("RAY_AUTH_TOKEN_PATH"),
                pid=os.getpid(),
            )
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """ray.init tries for minutes to reach a cluster that is gone; an address without a port is Ray's to look up."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at '{address}' ({error}): start `moetis serve`") from error


def head_is_gone() -> bool:
    """Whether the head of the cluster that this process is connected to has ended, or ends just now: what is asked of
    it would be waited for. A signal may go to all processes of a group, a service or a job, this one among them."""
    address = ray.get_runtime_context().gcs_address
    deadline = time.monotonic() + HEAD_ENDS_S
    while time.monotonic() < deadline:
        try:
            _check_reachable(address)
        except ConfigError:
            return True
        time.sleep(LOOK_S)
    return False


def write_contact(run_dir: Path, contact: Contact) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / CONTACT_FILE
    write_whole(path, json.dumps(asdict(contact), indent=1).encode())
    return path


def read_contact(run_dir: Path) -> Contact:
    """Raises ConfigError where no cluster runs with this run_dir."""
    path = run_dir / CONTACT_FILE
    try:
        return Contact(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"no cluster is running with run_dir '{run_dir}' ({path} is absent): start `moetis serve`"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}; start `moetis serve` again") from error


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _reread_environment()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread_environment()


def _reread_environment() -> None:
    """Ray reads these variables at its import, and keeps the first token that it finds: have it look again."""
    ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
