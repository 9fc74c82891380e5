"""Environments of the verifiers package, by a small stand-in with the names of its 0.4 that Tandem uses."""

import asyncio
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bridge.errors import ConfigError
from trainer_env import config, data, rewards
from trainer_env.config import DataConfig, RewardConfig
from trainer_env.data import verifiers_source
from trainer_env.extra_packages import install_command
from trainer_env.rewards.reward_errors import RewardError

COMMON = ("idx", "prompt", "system_prompt")


class TaskData:
    model_fields = dict.fromkeys(COMMON)

    def __init__(self, **values):
        self.__dict__.update({"prompt": None, "system_prompt": None, **values})


class SumData(TaskData):
    answer: str
    model_fields = dict.fromkeys((*COMMON, "answer", "level", "notes", "thing"))


class Task:
    NEEDS_CONTAINER = False
    key = hash = "k"

    def __init__(self, **values):
        self.data = SumData(**values)
        self.config = SimpleNamespace(judges=[])

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, kind):
        assert kind == "reward"
        return [self.right]

    async def right(self, trace):
        await asyncio.sleep(0)
        if trace.reply == "boom":
            raise LookupError("no such thing")
        return float(self.data.answer in trace.reply)

    async def score(self, trace):
        for reward in self.hooks("reward"):
            trace.reward += 2.0 * await reward(trace)


class Trace(SimpleNamespace):
    reward = 0.0

    @property
    def reply(self):
        assert [node.parent for node in self.nodes] == [None, *range(len(self.nodes) - 1)]
        assert [node.sampled for node in self.nodes] == [False] * (len(self.nodes) - 1) + [True]
        return self.nodes[-1].message.content


class Taskset:
    bounded = True
    tasks = ()

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.tasks)

    @classmethod
    def toolsets(cls, config):
        return []


class Sums(Taskset):
    @property
    def tasks(self):
        texts = [
            Task(prompt=f"{n}+1?", answer=str(n + 1), level=n, notes=["a"], thing=object())
            for n in range(self.config.n)
        ]
        turn = SimpleNamespace(role="user", content="2+2?")
        return [*texts, Task(prompt=[turn], system_prompt="Be brief.", answer="4", level=9, notes=[], thing=None)]


class Config(SimpleNamespace):
    @classmethod
    def model_validate(cls, values):
        if unknown := set(values) - {"id", "n"}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return cls(**{"n": 3, **values})


class Stand(ModuleType):
    """A module that is filled in here."""

    def __setattr__(self, name, value):
        vars(self)[name] = value


def message(role):
    return lambda content: SimpleNamespace(role=role, content=content)


@pytest.fixture
def library(monkeypatch):
    """The stand-in, importable as verifiers.v1; its tasksets are to be filled in."""
    package, v1 = Stand("verifiers"), Stand("verifiers.v1")
    package.v1 = v1
    v1.tasksets = {"sums": Sums}

    def config_type(name):
        if name not in v1.tasksets:
            raise ModuleNotFoundError(f"taskset {name!r} not found", name=name)
        return Config

    v1.taskset_config_type = config_type
    v1.load_taskset = lambda config: v1.tasksets[config.id](config)
    v1.TaskData = TaskData
    v1.Trace, v1.TraceTask, v1.AgentInfo, v1.AgentConfig, v1.MessageNode = Trace, *[SimpleNamespace] * 4
    v1.SystemMessage, v1.UserMessage, v1.AssistantMessage = map(message, ("system", "user", "assistant"))
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    verifiers_source.tasks.cache_clear()
    yield v1
    verifiers_source.tasks.cache_clear()


def load(name="sums", **settings):
    return data.load(DataConfig(source=f"verifiers:{name}", **{"eval_size": 0, **settings}), seed=0)


def refusal(**settings):
    with pytest.raises(ConfigError) as refused:
        load(**settings)
    return str(refused.value)


def test_tasks_become_examples_with_their_plain_fields(library):
    first, second, last = load(args={"n": 2}).train
    assert first.prompt == [{"role": "user", "content": "0+1?"}]
    assert (first.answer, second.answer, last.answer) == ("1", "2", "4")
    assert last.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert second.columns["level"] == 1
    assert second.columns["notes"] == ["a"]
    assert "thing" not in second.columns


@pytest.mark.parametrize("chat", [True, False])
def test_completions_are_scored_by_the_rewards_of_their_task(library, chat):
    examples = load(chat=chat).train[: 4 if chat else 3] if chat else load_raw(library)
    (reward,) = rewards.load([RewardConfig(function="verifiers")])
    rows = [examples[2], examples[0], examples[1], examples[0]]
    names = [name for name in data.column_names(rows) if name != "prompt"]
    texts = ["3", "1", "it is 2", "7"]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    assert reward([row.prompt for row in rows], completions, **data.columns(rows, names)) == [2.0, 2.0, 2.0, 0.0]


def load_raw(library):
    class Texts(Sums):
        @property
        def tasks(self):
            return super().tasks[:3]

    library.tasksets["texts"] = Texts
    return load("texts", chat=False).train


def test_a_held_out_environment_is_another_one(library):
    library.tasksets["other"] = Sums
    loaded = load(eval_split="verifiers:other", eval_size=2, args={"n": 4})
    assert (len(loaded.train), len(loaded.evaluation)) == (5, 2)
    assert all('"other"' in example.columns["verifiers_taskset"] for example in loaded.evaluation)


def test_scoring_that_fails_is_named_with_its_sample(library):
    rows = load().train[:2]
    (reward,) = rewards.load([RewardConfig(function="verifiers")])
    with pytest.raises(
        RewardError, match=r"(?s)scoring failed: LookupError: no such thing, for row 1.*completion: 'boom'"
    ):
        reward(
            [row.prompt for row in rows], ["1", "boom"], **data.columns(rows, ["verifiers_taskset", "verifiers_task"])
        )


def of_one_task(**attributes):
    task = type("Odd", (Task,), attributes)(prompt="a", answer="b")
    return type("Odds", (Taskset,), {"tasks": (task,)})


async def needy(trace, runtime):
    """A reward that wants a box."""


@pytest.mark.parametrize(
    ("taskset", "expected"),
    [
        (type("Endless", (Sums,), {"bounded": False}), "the tasks of odd never end"),
        (of_one_task(NEEDS_CONTAINER=True), "tasks of odd run in a container"),
        (of_one_task(toolsets=classmethod(lambda cls, config: ["tool"])), "tasks of odd have tools"),
        (of_one_task(hooks=lambda self, kind: [needy]), "a reward that needs a running process: needy"),
        (of_one_task(hooks=lambda self, kind: []), "tasks of odd have no rewards"),
        (type("Empty", (Taskset,), {}), "verifiers:odd: holds no examples"),
    ],
)
def test_what_is_more_than_one_turn_is_refused(library, taskset, expected):
    library.tasksets["odd"] = taskset
    assert expected in refusal(name="odd")


def test_a_missing_environment_and_wrong_arguments_are_named(library):
    message = refusal(name="summs")
    assert "the environment 'summs' cannot be imported: taskset 'summs' not found" in message
    assert install_command("PACKAGE") in message
    assert "ValueError: unknown: m" in refusal(args={"m": 1})
    del library.load_taskset
    verifiers_source.tasks.cache_clear()
    assert "this release of verifiers has no load_taskset" in refusal()


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed here")
def test_without_the_package_the_command_that_installs_it_is_told():
    message = refusal()
    assert "verifiers is not installed" in message
    assert install_command("verifiers>=0.4") in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.args.n=3"], "data.args: only an environment takes arguments"),
        (["rewards.0.function=verifiers"], "rewards.0.function: scores the tasks of data.source"),
    ],
)
def test_settings_that_need_an_environment_say_so(tmp_path, overrides, expected):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "m"\n[[rewards]]\nfunction = "exact_match"\n')
    with pytest.raises(ConfigError) as refused:
        config.load(path, overrides)
    assert expected in str(refused.value)
    assert config.load(path, ["data.source=verifiers:sums", *overrides])


def test_the_stand_in_is_used_as_the_package_is():
    """What Tandem calls, with the parameters that 0.4 has: run where the package is installed."""
    vf = pytest.importorskip("verifiers.v1")
    assert list(inspect.signature(vf.load_taskset).parameters) == ["config"]
    assert {"task", "agent", "nodes"} <= set(vf.Trace.model_fields)
    assert {"message", "parent", "sampled"} <= set(vf.MessageNode.model_fields)
    assert list(inspect.signature(vf.Task.score).parameters) == ["self", "trace", "runtime"]
