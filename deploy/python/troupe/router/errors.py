"""Errors that end a request, in the form of OpenAI's API."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["ApiError", "error_document", "one_line"]

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass
class ApiError(Exception):
    """An answer with a status of 400 or more.

    Attributes:
        message: one sentence, for the client.
        retry_after: seconds; in the header of that name.
        body: an engine's own answer, passed on as it is; else it is made from the message.
    """

    status: int
    message: str
    retry_after: int | None = None
    body: bytes | None = None

    def document(self) -> bytes:
        return self.body if self.body is not None else error_document(self.status, self.message)

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


def error_document(status: int, message: str) -> bytes:
    """`code` is the status, as in vLLM."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    said = message or f"status {status}"
    return json.dumps({"error": {"message": said, "type": kind, "param": None, "code": status}}).encode()


def one_line(text: str, most: int = 500) -> str:
    """For a log: text from others cannot look like lines of the router's own."""
    said = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[:most]
    )
    return said if len(text) <= most else f"{said}..."
