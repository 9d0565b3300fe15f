"""JSON over HTTP with deadlines, and with retries of what is safe to ask again."""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import Mapping
from typing import Any

from openenv_client.backoff import retry_delay
from schedulers.extras import missing_extra

try:
    import httpx2
except ImportError as error:
    raise missing_extra("OpenAIEngine needs httpx2", "openai", "httpx2") from error

__all__ = ["JsonClient", "ServerError", "ServerTimeoutError"]

_CONNECT_TIMEOUT = 10.0
_LONGEST_DELAY = 30.0
_EXCERPT = 500


class ServerError(RuntimeError):
    """A server cannot be reached, refused a request, failed, or answered in an unexpected form.

    Args:
        message: What happened.
        url: What was asked.
        status: What it was answered with; None when there was no answer.
        text: The beginning of the answer.
    """

    def __init__(self, message: str, *, url: str, status: int | None = None, text: str = "") -> None:
        super().__init__(message)
        self.url, self.status, self.text = url, status, text


class ServerTimeoutError(ServerError, TimeoutError):
    """A server took too long."""


class _Passing(Exception):  # noqa: N818 - it never leaves this module
    """A failure after which the same request may be sent again.

    Args:
        reason: What happened.
        status: What it was answered with.
        text: The beginning of the answer.
        after: Seconds that the server asks to wait.
    """

    def __init__(self, reason: str, status: int | None = None, text: str = "", after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.status, self.text, self.after = reason, status, text, after


class JsonClient:
    """Asks one server. All its methods belong to one event loop.

    Sent again, with growing delays, is what got no answer: the server was not reached, the connection broke, or it said
    408, 429 or 5xx. A request that took too long is not: of completions that would favour the short ones.

    Args:
        base_url: What all paths begin with.
        api_key: Sent as a bearer token; None sends none.
        max_concurrency: The most requests on their way at a time.
        request_timeout: Seconds that one attempt may take.
        total_timeout: Seconds for all attempts of a request, delays and the wait for a place included.
        max_retries: How often a request is sent again.
        retry_delay: Seconds before the first retry; later ones wait longer, up to 30 s.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        max_concurrency: int,
        request_timeout: float,
        total_timeout: float,
        max_retries: int,
        retry_delay: float,
    ) -> None:
        self.base_url = base_url
        self.request_timeout = request_timeout
        self.total_timeout = total_timeout
        self.max_retries = max_retries
        self.retry_delay = retry_delay
        self._api_key = api_key
        self._places = asyncio.Semaphore(max_concurrency)
        self._http = httpx2.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # Those of a whole attempt are kept here: the library's begin anew with every byte that arrives.
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
        )

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request until it is answered.

        Returns:
            The JSON of the answer.

        Raises:
            ServerTimeoutError: An attempt took longer than ``request_timeout``, or all of them than ``total_timeout``.
            ServerError: There was no good answer.
        """
        url = self.base_url + path
        failures: list[_Passing] = []
        try:
            return await asyncio.wait_for(self._retried(method, url, body, failures), self.total_timeout)
        except ServerError:
            raise
        except asyncio.TimeoutError:
            last = f"; failure {len(failures)}: {failures[-1].reason}" if failures else ""
            raise ServerTimeoutError(
                f"{method} {url}: no answer within total_timeout={self.total_timeout} s{last}", url=url
            ) from None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _retried(self, method: str, url: str, body: Mapping[str, Any] | None, failures: list[_Passing]) -> Any:
        deadline = time.monotonic() + self.total_timeout
        while True:
            try:
                async with self._places:
                    return await self._timed(method, url, body)
            except _Passing as failure:
                failures.append(failure)
            last = failures[-1]
            wait = last.after + retry_delay(len(failures), first=self.retry_delay, longest=_LONGEST_DELAY)
            times = "once" if len(failures) == 1 else f"{len(failures)} times"
            what = f"{method} {url} failed {times}, at last with: {last.reason}"
            if len(failures) > self.max_retries:
                raise ServerError(what, url=url, status=last.status, text=last.text)
            if time.monotonic() + wait > deadline:
                what += f"; the next attempt, in {wait:.0f} s, would come after total_timeout={self.total_timeout} s"
                raise ServerError(what, url=url, status=last.status, text=last.text)
            await asyncio.sleep(wait)

    async def _timed(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return await asyncio.wait_for(self._attempt(method, url, body), self.request_timeout)
        except asyncio.TimeoutError:
            raise ServerTimeoutError(
                f"{method} {url}: no answer within request_timeout={self.request_timeout} s", url=url
            ) from None

    async def _attempt(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._http.request(method, url, json=body)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException) as error:
            raise _Passing(f"no answer ({type(error).__name__}: {error})") from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise ServerError(f"{method} {url}: {type(error).__name__}: {error}", url=url) from error
        status, text = response.status_code, self._excerpt(response.text)
        answered = f"answered {status}: {text}"
        if status in (408, 429) or status >= 500:
            raise _Passing(answered, status, text, _retry_after(response.headers.get("Retry-After")))
        if not 200 <= status < 300:
            raise ServerError(f"{method} {url} {answered}", url=url, status=status, text=text)
        try:
            return response.json()
        except ValueError:
            raise ServerError(f"{method} {url} answered with no JSON: {text}", url=url, status=status) from None

    def _excerpt(self, text: str) -> str:
        """What of an answer may stand in an error; some servers repeat the key that they refuse."""
        shown = text if self._api_key is None else text.replace(self._api_key, "…")
        return " ".join(shown.split())[:_EXCERPT] or "(nothing)"


def _retry_after(value: str | None) -> float:
    """The seconds of a ``Retry-After``, which may be a number or a date; 0 when it says nothing."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
