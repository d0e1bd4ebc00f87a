"""Errors of a request, with the HTTP status and the fields of OpenAI's error object."""

from __future__ import annotations

from typing import Any

# The `type` of OpenAI's error object by status; 4xx and 5xx have defaults of their own.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestError(Exception):
    """A request that gets an error as its answer.

    Attributes:
        status: HTTP status.
        param: the field that is wrong, if it is one.
        code: OpenAI's code of the error, if it has one.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        # A request may hold lone surrogates, which no response can be encoded with.
        message = str(self).encode("utf-8", "replace").decode()
        kind = _TYPES.get(self.status, default)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class QueueFullError(RequestError):
    """Too many requests wait."""

    def __init__(self, waiting: int):
        super().__init__(
            429, f"{waiting} requests wait already; try again later", headers={"Retry-After": "1"}
        )


class StoppedError(RequestError):
    """The server ended before the answer was complete, or before it began."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping, so the answer is not complete")


class SequenceError(RequestError):
    """The settings of a request raised an error while its sequence was generated."""

    def __init__(self, message: str):
        super().__init__(422, f"the answer cannot be generated with these settings: {message}")
