"""The gateway on Ray Serve: a proxy that listens, replicas that answer, all on the address that was asked for."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve._private import replica as serve_replica
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig
from transformers import AutoConfig, GenerationConfig

from cluster.config import ClusterConfig
from cluster.gateway.app import Gateway, GatewaySettings, make_app
from cluster.gateway.desk import Desk, RelayActorPort
from cluster.gateway.keys import read_key_hashes
from cluster.text import load_tokenizer
from placement.errors import ConfigError, MoetisError

SPARE_REQUESTS = 256
STOP_TIMEOUT_S = 5
# Serve notices that a replica was killed when it next asks for its health.
HEALTH_PERIOD_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the gateway listens."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """HOST:PORT, [V6]:PORT or PORT alone (on loopback). Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--http '{text}': give HOST:PORT, such as 127.0.0.1:8000")
    return Address(host=host.strip("[]") or "127.0.0.1", port=int(port))


def check_address(address: Address, *, with_keys: bool) -> None:
    """Raises ConfigError where it can't be listened on, or is open to others and no key is asked for."""
    if not address.is_loopback and not with_keys:
        raise ConfigError(
            f"--http '{address}' can be reached from other machines: set gateway.api_keys_file or gateway.api_keys_env"
        )
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError(f"--http '{address}': cannot listen there: {error.strerror}") from error


def gateway_settings(config: ClusterConfig) -> GatewaySettings:
    """What replicas must know, off the model's folder and the configuration. Raises ConfigError."""
    try:
        model = AutoConfig.from_pretrained(config.model, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model '{config.model}': config.json: {str(error).splitlines()[0]}") from error
    gateway, workers = config.gateway, config.workers
    return GatewaySettings(
        model=gateway.model_name or config.model.resolve().name,
        vocabulary=model.vocab_size,
        context=min(model.max_position_embeddings, workers.kv_page_size * workers.kv_pages),
        end_tokens=_end_tokens(config.model, model.eos_token_id),
        default_max_tokens=gateway.default_max_tokens,
        max_body=gateway.max_body_kb * 1024,
        created=int(time.time()),
        key_hashes=read_key_hashes(gateway),
    )


def _end_tokens(model: Path, of_config: int | list[int] | None) -> frozenset[int]:
    """The tokens that end an answer, as the workers' engine takes them."""
    end = of_config
    if (model / "generation_config.json").is_file():
        end = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
    return frozenset([] if end is None else [end] if isinstance(end, int) else end)


class GatewayReplica:
    """One replica, in a process of its own: Serve hands it what its proxy receives."""

    def __init__(self, settings: GatewaySettings, model: Path, relay: ActorHandle[Any]) -> None:
        _open_no_internal_port()
        self._settings = settings
        self._gateway = Gateway(settings, Desk(RelayActorPort(relay), uuid.uuid4().hex), load_tokenizer(model))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._gateway, self._settings)


def _open_no_internal_port() -> None:
    """Serve 2.60 opens a gRPC port in each replica on all interfaces, without a key, and unpickles what comes there.

    Nothing here talks that way (proxies call replicas as actors, unless RAY_SERVE_USE_GRPC_BY_DEFAULT is set), so in
    this process the port is not opened. A test looks at all that listens.
    """

    def open_nothing(server: Any, address: str) -> int:
        return 0

    serve_replica.add_port_to_grpc_server = open_nothing


@contextmanager
def gateway(
    config: ClusterConfig, settings: GatewaySettings, relay: ActorHandle[Any], address: Address
) -> Iterator[None]:
    """Listen on the address until the context ends. Raises ConfigError where Serve already listens elsewhere."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    deployment = serve.deployment(
        num_replicas=config.gateway.replicas,
        max_ongoing_requests=config.gateway.max_requests + SPARE_REQUESTS,
        max_queued_requests=config.gateway.max_requests + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=STOP_TIMEOUT_S,
        health_check_period_s=HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(GatewayReplica))
    name = f"moetis-{config.name}"
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": address.host, "port": address.port},
            logging_config=quiet,
        )
        serve.run(
            deployment.bind(settings, config.model.absolute(), relay),
            name=name,
            route_prefix="/",
            logging_config=quiet,
        )
    except (RayServeException, RuntimeError, TimeoutError) as error:
        raise MoetisError(f"the gateway did not start: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        if config.ray.address != "local":
            serve.delete(name)
