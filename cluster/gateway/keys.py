"""API keys of the gateway. Only their hashes leave this file; nothing prints a key."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from cluster.config import GatewayConfig
from placement.errors import ConfigError

SHORTEST_KEY = 16


def read_key_hashes(config: GatewayConfig) -> tuple[bytes, ...]:
    """The SHA-256 of each key, from the file or the environment variable that the configuration names; none: ().

    Raises ConfigError where the source is missing, empty, or holds a key that is too short to be one.
    """
    if config.api_keys_file is not None and config.api_keys_env is not None:
        raise ConfigError("gateway.api_keys_file and gateway.api_keys_env are both given; give one")
    if config.api_keys_file is not None:
        source = f"gateway.api_keys_file '{config.api_keys_file}'"
        try:
            text = Path(config.api_keys_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    elif config.api_keys_env is not None:
        source = f"gateway.api_keys_env '{config.api_keys_env}'"
        keys = [key.strip() for key in os.environ.get(config.api_keys_env, "").split(",") if key.strip()]
    else:
        return ()
    if not keys:
        raise ConfigError(f"{source}: holds no key; give one a line in a file, or separated by commas in a variable")
    if min(map(len, keys)) < SHORTEST_KEY:
        raise ConfigError(f"{source}: a key has fewer than {SHORTEST_KEY} characters")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def key_is_known(authorization: str | None, hashes: tuple[bytes, ...]) -> bool:
    """Whether an Authorization header carries one of the keys. All are compared, in time that tells nothing."""
    if not hashes:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    given = hashlib.sha256(key.strip().encode()).digest()
    return sum(hmac.compare_digest(given, known) for known in hashes) > 0
