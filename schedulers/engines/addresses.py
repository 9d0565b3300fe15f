"""Addresses of servers that speak OpenAI's protocol."""

from __future__ import annotations

from urllib.parse import urlsplit

from openenv_client.protocol import without_secrets

__all__ = ["http_address"]


def http_address(base_url: str) -> str:
    """The address that paths such as ``/models`` follow, without a slash at its end.

    Args:
        base_url: As OpenAI's own client takes it, such as ``https://api.openai.com/v1``. Without a path it gets
            ``/v1``.

    Raises:
        ValueError: It is no such address.
    """
    try:
        parts = urlsplit(base_url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is no number; its text may show a part of a password
        usable = False
    if usable and (parts.username is not None or parts.query or parts.fragment):
        raise ValueError("base_url must have no user name, password, query or fragment; a key goes into api_key")
    if not usable:
        shown = without_secrets(base_url)
        raise ValueError(f"base_url must be an address such as http://127.0.0.1:8000/v1, not {shown!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
