"""A Ray cluster of one's own on this machine, or the road to one that a Moetis cluster runs on already.

Plain `ray.init()` joins whatever cluster it finds. Here everything is explicit: a new cluster gets its own temp dir and
its own token, listens on loopback, and ends with the process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from placement.errors import ConfigError
from placement.files import write_whole

NAMESPACE = "moetis"
CONTACT_FILE = "cluster.json"
_OWN_VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray replaces 127.0.0.1 by the machine's outer address, but takes the rest of the loopback range as it is.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


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
    folder = Path(tempfile.mkdtemp(prefix="moetis-ray-"))
    token_path = folder / "token"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32))
    variables = _OWN_VARIABLES | {"RAY_AUTH_TOKEN_PATH": str(token_path)}
    try:
        with _environment(variables):
            context = ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                object_store_memory=object_store_mb * 10**6,
                _temp_dir=str(folder / "ray"),
                _node_ip_address=_LOOPBACK,
            )
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


@contextmanager
def joined_cluster(address: str, token_path: str | None = None) -> Iterator[Contact]:
    """Connect to a running Ray cluster, which goes on when the context ends. Raises ConfigError if it isn't there."""
    variables = _OWN_VARIABLES | {"RAY_AUTH_TOKEN_PATH": token_path} if token_path else {}
    with _environment(variables):
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster answers at '{address}': {str(error).splitlines()[0]}") from error
        try:
            yield Contact(name=NAMESPACE, address=address, namespace=NAMESPACE, token_path=token_path, pid=os.getpid())
        finally:
            ray.shutdown()


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
    """Ray reads how to authenticate at its import and keeps the first token that it finds: have it look again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
