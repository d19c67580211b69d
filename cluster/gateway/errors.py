"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """An answer to one client: an HTTP status and what was wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that pydantic found wrong with a request."""
    problem = error.errors(include_url=False)[0]
    # A union's branches put their names into the path: ('stop', 'list[str]', 0). The key is what a client knows.
    param = str(problem["loc"][0]) if problem["loc"] else None
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {param}", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        path = ".".join(str(step) for step in problem["loc"])
        return ApiError(400, f"'{path}' is required", param=param, code="missing_required_parameter")
    given = repr(problem["input"])[:80]
    reason = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"'{param}': {reason} (got {given})" if param else reason, param=param, code="invalid_value")
