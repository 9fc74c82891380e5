"""A judge over HTTP: what it is asked, how its replies are read, and what happens when it misbehaves."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bridge.errors import ConfigError
from trainer_env import rewards
from trainer_env.config import RewardConfig
from trainer_env.rewards import judge_reward
from trainer_env.rewards.builtin_rewards import BUILTINS
from trainer_env.rewards.reward_errors import RewardError

PROMPT = "Q: {prompt}\nA: {completion}\nRight: {answer}"


class Judge(ThreadingHTTPServer):
    """Answers each request with the next of its plan, and with the last one from then on."""

    daemon_threads = True

    def __init__(self, *plan):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.asked, self.lock = list(plan), [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        """Clients that leave are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Judge  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self):
        self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            step = self.server.plan.pop(0) if len(self.server.plan) > 1 else self.server.plan[0]
        if callable(step):
            step(self)
        elif isinstance(step, tuple):
            self.reply(*step)
        else:
            self.reply(200, says(step))

    def reply(self, status, content, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):  # noqa: A002 (as the base class calls it)
        pass


def says(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def judge():
    started = []

    def start(*plan):
        server = Judge(*plan)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(judge_reward, "_LONGEST_WAIT_S", 0.02)


def load(server, **args):
    url = server if isinstance(server, str) else server.url
    args = {"base_url": url, "model": "m", "prompt": PROMPT, **args}
    return rewards.load([RewardConfig(function="llm_judge", args=args)])[0]


def failure(server, completions=("c",), **args):
    with pytest.raises(RewardError) as failed:
        load(server, **args)(["p"] * len(completions), list(completions))
    return str(failed.value)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7", 0.7),
        ("Score: 8/10", 0.8),
        ("8 out of 10.", 0.8),
        ("First I thought 3, but it is 9.", 0.9),
        ('{"reason": "2 faults", "score": 4}', 0.4),
        ('```json\n{"score": "4.5", "of": 10}\n```', 0.45),
        ("<think>1 or 2</think>10", 1.0),
        ("0", 0.0),
        ("**7**/10", 0.7),
        ("I give 8 of 10", 0.8),
        ("Score: 7 (out of 10)", 0.7),
        ("Rating: [[7]] out of [[10]]", 0.7),
        ("7 on a scale of 0 to 10", 0.7),
        ("On a scale (1\u201310.0) it is 7", 0.7),
        ("Score: 7/10 because 2 errors", 0.7),
        ("10/10", 1.0),
        ("2 of 3 facts are right.\nScore: 4", 0.4),
        ("1. Right\n2. Clear\n**Score:** 10", 1.0),
        ("0 faults.\n\n**10**.", 1.0),
    ],
)
def test_a_reply_counts_by_its_score_or_its_last_number(judge, reply, expected):
    assert load(judge(reply))(["p"], ["c"]) == [pytest.approx(expected)]


def test_the_scale_is_moved_to_0_to_1(judge):
    assert load(judge("-1"), scale=[-2, 2])(["p"], ["c"]) == [0.25]


def test_what_the_judge_is_asked(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    server = judge("5")
    chat = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "One {answer}?"}]
    reward = load(server, api_key_env="JUDGE_KEY", request={"temperature": 0.5, "max_tokens": 9})
    reward([chat], [[{"role": "assistant", "content": "{prompt} is 1"}]], answer=[["1", "one"]])
    ((path, headers, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k3y"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Q: Brief.\nOne {answer}?\nA: {prompt} is 1\nRight: 1\none"}],
        "temperature": 0.5,
        "max_tokens": 9,
    }


def test_without_a_key_none_is_sent(judge):
    server = judge("5")
    load(f"{server.url}/")(["p"], ["c"])
    ((path, headers, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["temperature"] == 0


def test_requests_are_made_at_the_same_time_up_to_parallel_and_rows_keep_their_order(judge):
    barrier = threading.Barrier(3)

    def together(handler):
        barrier.wait(90)
        handler.reply(200, says(handler.body["messages"][0]["content"]))

    rows = load(judge(together), parallel=3, prompt="{completion}")(["p"] * 6, list("543210"))
    assert rows == [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]


def drop(handler):
    handler.connection.close()


def later(seconds):
    def step(handler):
        time.sleep(seconds)
        handler.reply(200, says("1"))

    return step


@pytest.mark.parametrize("trouble", [(429, b"slow down"), (500, b"oops"), (503, b""), drop])
def test_passing_trouble_is_waited_out(judge, trouble):
    server = judge(trouble, trouble, "6")
    assert load(server, request_timeout_s=30)(["p"], ["c"]) == [0.6]
    assert len(server.asked) == 3


def test_replies_that_are_late_are_not_waited_for_and_the_next_one_counts(judge):
    server = judge(later(2), later(2), "6")
    assert load(server, request_timeout_s=1)(["p"], ["c"]) == [0.6]
    assert len(server.asked) >= 3  # The good one may be late, too.


def test_retry_after_is_honoured(judge, monkeypatch):
    monkeypatch.setattr(judge_reward, "_LONGEST_WAIT_S", 1.0)
    at = []

    def busy(handler):
        at.append(time.monotonic())
        handler.reply(429, b"", Retry_After="1")

    def fine(handler):
        at.append(time.monotonic())
        handler.reply(200, says("6"))

    assert load(judge(busy, fine))(["p"], ["c"]) == [0.6]
    assert at[1] - at[0] >= 0.99


def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    except OSError:
        pass


def flood(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b" " * 2**16)
    except OSError:
        pass


@pytest.mark.parametrize(
    ("trouble", "expected", "asked"),
    [
        ((500, b"oops"), "HTTP 500: 'oops'", 3),
        ((401, b"who are you"), "HTTP 401: 'who are you'", 1),
        ((404, b"no such model"), "HTTP 404", 1),
        ((301, b""), "HTTP 301", 1),
        ((200, b"<html>"), "not a chat completion: b'<html>'", 1),
        ((200, b'{"choices": []}'), "not a chat completion", 1),
        ((200, b"\xff\xfe"), "not a chat completion", 1),
        (drop, "no connection", 3),
        (flood, "a reply of more than", 1),
        ("no idea", "replied twice without a clear number from 0 to 10", 2),
        ("99", "nothing but the number): '99'", 2),
        ((200, b'{"choices": [{"message": {"content": null}}]}'), "nothing but the number): ''", 2),
        ("9" * 5000, "without a clear number", 2),
        ("11/10", "without a clear number", 2),
    ],
)
def test_lasting_trouble_is_one_error_that_names_the_sample(judge, trouble, expected, asked):
    server = judge(trouble)
    message = failure(server, retries=2, request_timeout_s=30)
    assert expected in message
    assert f"the judge m at {server.url}/chat/completions" in message
    assert "for row 0.\n  prompt: 'p'\n  completion: 'c'" in message
    assert len(server.asked) == asked


@pytest.mark.parametrize(("trouble", "expected"), [(later(4), "no reply"), (drip, "no whole reply")])
def test_a_reply_that_is_always_late_is_asked_for_as_often_as_allowed(judge, trouble, expected):
    server = judge(trouble)
    assert f"{expected} within 1 s" in failure(server, retries=2, request_timeout_s=1)
    deadline = time.monotonic() + 60
    while len(server.asked) < 3:  # A request that was given up may not have been read yet.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(server.asked) == 3


def test_all_tries_of_a_batch_share_its_time(judge, monkeypatch):
    monkeypatch.setattr(judge_reward, "_LONGEST_WAIT_S", 3600.0)

    def busy(handler):
        handler.reply(429, b"", Retry_After="3600")

    up = "s for a batch are up (raise rewards.timeout_s), for row 0"
    assert f"HTTP 429: '', and the 300 {up}" in failure(judge(busy), batch_s=300)
    for retries in (0, 4):
        assert f", and the 1 {up}" in failure(judge(later(60)), batch_s=1, retries=retries)


@pytest.mark.parametrize(("args", "expected"), [({}, 108.0), ({"batch_s": 7}, 7)])
def test_the_time_of_a_batch_is_a_little_less_than_the_rewards(monkeypatch, args, expected):
    given = []

    def make(*, batch_s=1.0):
        given.append(batch_s)
        return lambda **_: []

    monkeypatch.setitem(BUILTINS, "llm_judge", make)  # pyright: ignore[reportArgumentType]
    rewards.load([RewardConfig(function="llm_judge", timeout_s=120, args=args)])
    assert given == [expected]


def test_nobody_listening_is_named():
    assert "no connection" in failure("http://127.0.0.1:9/v1", retries=0)


@pytest.mark.parametrize("reply", ["hm", "7\n\n(10 = perfect)", "It is a 7, where the best is 10.", "7 to 10"])
def test_a_reply_without_a_clear_number_is_asked_for_once_more(judge, reply):
    server = judge(reply, "4")
    assert load(server)(["p"], ["c"]) == [0.4]
    assert len(server.asked) == 2


def test_the_key_is_in_no_error(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y-s3cret")
    assert "k3y-s3cret" not in failure(judge((401, b"no")), api_key_env="JUDGE_KEY")


def test_white_space_around_the_key_is_left_out(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " k3y\n")
    server = judge("5")
    assert load(server, api_key_env="JUDGE_KEY")(["p"], ["c"]) == [0.5]
    assert server.asked[0][1]["Authorization"] == "Bearer k3y"


@pytest.mark.parametrize("key", ["s3cret\nmore", "s3cr\u00e9t s3cret", "s3cret\x7f", " \n"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ConfigError) as refused:
        load("http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY")
    assert "api_key_env: the environment variable JUDGE_KEY" in str(refused.value)
    assert "s3c" not in str(refused.value)


def test_a_proxy_of_the_environment_is_not_on_the_way_to_this_machine(judge, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert load(judge("5"), retries=0)(["p"], ["c"]) == [0.5]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"prompt": "{completion} {label}"}, "knows {prompt}, {completion} and {answer}, got {label}"),
        ({"prompt": "{completion.__class__}"}, "got {completion.__class__}"),
        ({"prompt": "{completion!r}"}, "knows {prompt}"),
        ({"prompt": "rate it"}, "does not show the judge the {completion}"),
        ({"prompt": "{completion"}, "expected '}'"),
        ({"scale": [5, 1]}, "scale: expected the lowest and the highest"),
        ({"scale": [1]}, "scale: expected the lowest and the highest"),
        ({"base_url": "127.0.0.1:80"}, "base_url: expected an address such as"),
        ({"base_url": "http://me:s3cret@x/v1"}, "base_url: holds a key"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "the environment variable NOT_SET_ANYWHERE is not set"),
        ({"api_key_env": "sk-s3cret"}, "expected the name of an environment variable in capitals"),
        ({"api_key": "s3cret"}, "there is no such argument"),
        ({"parallel": 0}, "parallel of at least 1"),
        ({"batch_s": 0}, "batch_s above 0"),
    ],
)
def test_bad_settings_are_refused_when_loaded_and_no_key_is_repeated(args, expected):
    with pytest.raises(ConfigError) as refused:
        load("http://127.0.0.1:9/v1", **args)
    assert expected in str(refused.value)
    assert "s3cret" not in str(refused.value)
