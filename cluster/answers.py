"""Answers of actors, with the errors of what they wrap instead of Ray's."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from placement.errors import MoetisError


def answer(refs: Any, timeout_s: float = 600.0) -> Any:
    """ray.get, with the actor's own error instead of Ray's wrapping of it. Raises MoetisError."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, MoetisError):
            raise error.cause from None
        raise MoetisError(f"an actor failed: {error.cause!r}") from error
    except RayActorError as error:
        cause = getattr(error, "cause", None)
        raise MoetisError(f"an actor died: {cause or str(error).splitlines()[0]}") from error
    except GetTimeoutError as error:
        raise MoetisError(f"an actor gave no answer for {timeout_s:.0f} s") from error
