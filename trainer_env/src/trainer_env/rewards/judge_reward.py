"""A reward that another language model gives, asked over the OpenAI protocol."""

import os
import random
import re
import string
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from trainer_env.rewards import daemons
from trainer_env.rewards.completions import Completion, RewardFunction, RowError, bounded, text_of

if TYPE_CHECKING:
    import httpx

_FIELDS = ("prompt", "completion", "answer")
_MAX_REPLY_BYTES = 2**20
_LONGEST_WAIT_S = 30.0
_MARKUP = "*_`()[] \t"
_GAP = r"[*_`()\[\]\s]{0,8}"
_OF = rf"{_GAP}(?:/|out of|of){_GAP}"
_NUMBER = r"-?\d+(?:\.\d+)?"
_SCORE = re.compile(r'"score"\s{0,3}:\s{0,3}"?(-?\d+(?:\.\d+)?)')


class _Choice(msgspec.Struct):
    message: dict[str, Any]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _Again(Exception):
    """A request that may go better a moment later. wait_s: what the endpoint asked for."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class _TimeIsUp(Exception):
    """No time is left for another request."""


def llm_judge(
    *,
    base_url: str,
    model: str,
    prompt: str,
    scale: Sequence[float] = (0, 10),
    api_key_env: str = "",
    request: Mapping[str, Any] | None = None,
    parallel: int = 8,
    retries: int = 4,
    request_timeout_s: float = 30.0,
    batch_s: float = 54.0,
) -> RewardFunction:
    """What a judge says of a completion, moved from its scale to 0..1.

    base_url: of an OpenAI-protocol server, up to /v1. prompt: what the judge is asked, with {prompt}, {completion} and
    {answer} in it. Its reply counts by the "score" of a JSON object in it, else by its last number of the scale's
    highest ("7/10", "7 out of 10"), else by its last number. One without a number on the scale, or that may name but
    the scale's end ("7 (10 is best)"), is asked for once more. api_key_env: the environment variable that holds the
    key. request: more fields of the request, {"temperature": 0} unless given. parallel: requests at once. retries: of a
    request that ends in 429, 5xx, no connection or no reply in time, each after a longer wait. batch_s: for all of a
    batch's requests and waits; nine tenths of rewards.timeout_s unless given. Raises ValueError.
    """
    low, high = _checked_scale(scale)
    _check_prompt(prompt)
    address = _checked_address(base_url)
    key = _key(api_key_env)
    if parallel < 1 or retries < 0 or not min(request_timeout_s, batch_s) > 0:
        raise ValueError(
            "expected parallel of at least 1, retries of at least 0, and request_timeout_s and batch_s above 0"
        )
    fields = {"temperature": 0} if request is None else dict(request)

    @bounded
    def reward(*, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        answers = columns.get("answer") or [None] * len(completions)
        questions = [
            _filled(prompt, prompt=_asked(asked), completion=text_of(completion), answer=_joined(answer))
            for asked, completion, answer in zip(prompts, completions, answers, strict=True)
        ]
        deadline = time.monotonic() + batch_s
        with _client(address, key) as client:

            def judged(place: tuple[int, str]) -> float:
                row, question = place
                body = {"model": model, "messages": [{"role": "user", "content": question}], **fields}
                text = ""
                try:
                    for _ in range(2):
                        text = _reply(client, address, body, retries, request_timeout_s, deadline=deadline)
                        value = _score(text, low, high)
                        if value is not None:
                            return (value - low) / (high - low)
                    raise ValueError(
                        f"replied twice without a clear number from {low:g} to {high:g} (let the prompt ask for "
                        f"nothing but the number): {text!r:.200}"
                    )
                except _TimeIsUp as error:
                    what = f"{error}, and the {batch_s:g} s for a batch are up (raise rewards.timeout_s)"
                    raise RowError(row, f"the judge {model} at {address}: {what}") from None
                except (_Again, ValueError) as error:
                    raise RowError(row, f"the judge {model} at {address}: {error}") from None

            return daemons.each(judged, list(enumerate(questions)), parallel)

    return reward


def _client(address: str, key: str) -> "httpx.Client":
    import httpx

    host = urlsplit(address).hostname or ""
    return httpx.Client(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        # A proxy of the environment's is not on the way to this machine.
        trust_env=host not in ("localhost", "::1") and not host.startswith("127."),
    )


def _reply(
    client: "httpx.Client", address: str, body: Mapping[str, Any], retries: int, timeout_s: float, *, deadline: float
) -> str:
    """The text of a reply. deadline: on the monotonic clock, for all tries.

    Raises _Again when there is none after all retries, _TimeIsUp when the deadline is before the next one, ValueError
    when another is no use.
    """
    for attempt in range(retries + 1):
        left = deadline - time.monotonic()
        if left <= 0:
            raise _TimeIsUp("it was not its turn yet")
        try:
            return _asked_once(client, address, body, min(timeout_s, left))
        except _Again as error:
            longer = min(_LONGEST_WAIT_S, 0.5 * 2**attempt) * random.uniform(0.5, 1)  # noqa: S311 (a wait, no secret)
            wait = max(longer, min(error.wait_s, _LONGEST_WAIT_S)) if attempt < retries else 0.0
            if time.monotonic() + wait >= deadline:
                raise _TimeIsUp(str(error)) from None
            if attempt == retries:
                raise
            time.sleep(wait)
    raise AssertionError


def _asked_once(client: "httpx.Client", address: str, body: Mapping[str, Any], timeout_s: float) -> str:
    import httpx

    deadline = time.monotonic() + timeout_s
    content = b""
    try:
        with client.stream("POST", address, json=body, timeout=timeout_s) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > _MAX_REPLY_BYTES:
                    raise ValueError(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise _Again(f"no whole reply within {timeout_s:.3g} s")
    except httpx.TimeoutException:
        raise _Again(f"no reply within {timeout_s:.3g} s") from None
    except httpx.TransportError as error:
        raise _Again(f"no connection: {error or type(error).__name__}") from None
    if (
        response.status_code == httpx.codes.TOO_MANY_REQUESTS
        or response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    ):
        wait = response.headers.get("Retry-After", "")
        raise _Again(_status(response, content), float(wait) if wait.isdecimal() else 0.0)
    if response.status_code != httpx.codes.OK:
        raise ValueError(_status(response, content))
    try:
        text = msgspec.json.decode(content, type=_Reply).choices[0].message.get("content")
    except (msgspec.MsgspecError, IndexError, UnicodeDecodeError):
        raise ValueError(f"not a chat completion: {content[:200]!r}") from None
    return text if isinstance(text, str) else ""


def _status(response: "httpx.Response", content: bytes) -> str:
    return f"HTTP {response.status_code}: {content[:200].decode(errors='replace')!r}"


def _score(text: str, low: float, high: float) -> float | None:
    """The number that a reply calls its score, gives of the highest one, or else ends in; None for none on the scale.

    None, too, where it may be but a word on the scale: the highest score in a sentence with another one before it.
    """
    text = text.rpartition("</think>")[2]
    top = rf"{re.escape(f'{high:g}')}(?:\.0+)?(?!\.?\d)"
    scale = rf"{_NUMBER}{_GAP}(?:to|-|\u2013){_GAP}{top}"
    rest = re.sub(scale, "", text, flags=re.IGNORECASE)
    named = _SCORE.findall(text) or re.findall(rf"({_NUMBER}){_OF}{top}", rest, re.IGNORECASE)
    if named:
        return _on_scale(named[-1], low, high)
    rest = re.sub(rf"(?<=\d){_OF}\d+(?:\.\d+)?", "", rest, flags=re.IGNORECASE)
    numbers = list(re.finditer(_NUMBER, rest))
    value = _on_scale(numbers[-1][0], low, high) if numbers else None
    others = any(_on_scale(number[0], low, high) not in (None, high) for number in numbers)
    return None if value == high and others and not _stands_out(numbers[-1]) else value


def _on_scale(number: str, low: float, high: float) -> float | None:
    value = float(number) if len(number) <= 100 else low - 1
    return value if low <= value <= high else None


def _stands_out(number: re.Match[str]) -> bool:
    """Whether a number stands alone in its line, or behind a colon or an equals sign."""
    before = number.string[: number.start()].rpartition("\n")[2].rstrip(_MARKUP)
    after = number.string[number.end() :].partition("\n")[0].strip(_MARKUP)
    return before.endswith((":", "=")) or (not before and after in ("", ".", "!"))


def _filled(template: str, **values: str) -> str:
    return template.format_map(values)


def _asked(prompt: Any) -> str:
    """A prompt as the judge reads it: text, or a conversation's turns one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(text_of([message]) for message in prompt)


def _joined(answer: Any) -> str:
    return "\n".join(map(str, answer)) if isinstance(answer, list) else str(answer or "")


def _checked_scale(scale: Sequence[float]) -> tuple[float, float]:
    if isinstance(scale, str) or len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError(f"scale: expected the lowest and the highest score, as in [0, 10], got {scale!r}")
    return scale[0], scale[1]


def _check_prompt(prompt: str) -> None:
    found = [
        (name, spec or conversion) for _, name, spec, conversion in string.Formatter().parse(prompt) if name is not None
    ]
    for name, more in found:
        if name not in _FIELDS or more:
            raise ValueError(f"prompt: knows {{prompt}}, {{completion}} and {{answer}}, got {{{name}}}")
    if "completion" not in [name for name, _ in found]:
        raise ValueError("prompt: does not show the judge the {completion}")


def _checked_address(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url: expected an address such as http://127.0.0.1:8000/v1, got {base_url!r}")
    if parts.username or parts.password or parts.query:
        raise ValueError("base_url: holds a key; name the environment variable that has it in api_key_env")
    return base_url.rstrip("/") + "/chat/completions"


def _key(variable: str) -> str:
    """The key that a variable holds. What is no variable's name may be a key: it is not repeated."""
    if not variable:
        return ""
    if not re.fullmatch("[A-Z_][A-Z0-9_]*", variable):
        raise ValueError("api_key_env: expected the name of an environment variable in capitals, not a key itself")
    # One read from a file brings a line's end with it.
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"api_key_env: the environment variable {variable} holds characters that no header can carry")
    return key
