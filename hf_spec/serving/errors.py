"""Request errors with HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

# `type` of OpenAI's error object by status; other 4xx and 5xx have defaults.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestError(Exception):
    """Error that is returned as the response of a request, with its HTTP status.

    `param` is the invalid field and `code` OpenAI's error code, if any; `headers` are added.
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
        """JSON body of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        # A quoted request may contain lone surrogates, which cannot be encoded.
        message = str(self).encode("utf-8", "replace").decode()
        kind = _TYPES.get(self.status, default)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class StoppedError(RequestError):
    """Shutdown before the response was complete."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping; the response is incomplete")
