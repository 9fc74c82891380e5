"""A run that is killed at one point of a step after another, gone on with each time; a process of its own.

    python killed_run.py FOLDER

It leaves the runs `whole`, which nothing happens to, and `killed`, and in FOLDER/journal.jsonl what was asked and
served in each life. Each life is a fork: the libraries are imported once, and no thread of theirs has worked before.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.digest import digest

SETTINGS = ("grpo.max_steps=6", "grpo.save_steps=2", "grpo.learning_rate=1e-3")
LIVES = [
    ("sampling", 4),
    ("rewarding", 3),
    ("publishing", 3),
    ("published", 3),
    ("half a line", 3),
    ("recorded", 3),
    ("no optimizer yet", 4),
    ("no state yet", 4),
    ("half a state", 4),
    ("saved", 4),
    ("published", 6),
]
"""Where in a step, and in which step."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, when: Callable[..., bool], *, before: Any = None, after: Any = None) -> None:
    """Have something done before or after each call of a method for which `when` holds."""
    method = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = when(self, *args, **kwargs)
        if now and before:
            before(self, *args, **kwargs)
        result = method(self, *args, **kwargs)
        if now and after:
            after(self, *args, **kwargs)
        return result

    setattr(owner, name, changed)


def arrange(point: str, step: int, server_class: Any) -> None:
    """Let this process be killed at a point of a step."""
    from transformers import Trainer, TrainerState

    from bridge.protocol import PublishAdapter
    from trainer_env.runs.jsonl import JsonLines

    def half_a_line(file: Any, record: Any) -> None:
        os.write(file._file, json.dumps({"step": record.step, "version": record.version})[:9].encode())
        die()

    def half_a_state(_: Any, path: str) -> None:
        Path(path).write_text('{"global_step": ')
        die()

    def sampling(server: Any, *_: Any) -> bool:
        return server.version == step - 1 and server._asked == 1

    def publishing(_: Any, request: Any, *__: Any) -> bool:
        return isinstance(request, PublishAdapter) and request.version == step

    def recording(file: Any, record: Any) -> bool:
        return file.path.name == "metrics.jsonl" and record.step == step

    def at_step(trainer: Any, *_: Any) -> bool:
        return trainer.state.global_step == step

    def state_at_step(state: Any, _: Any) -> bool:
        return state.global_step == step

    points: dict[str, tuple[Any, str, Callable[..., bool], dict[str, Any]]] = {
        "sampling": (server_class, "_generate", sampling, {"before": die}),
        "publishing": (server_class, "ask", publishing, {"before": die}),
        "published": (server_class, "ask", publishing, {"after": die}),
        "half a line": (JsonLines, "append", recording, {"before": half_a_line}),
        "recorded": (JsonLines, "append", recording, {"after": die}),
        "no optimizer yet": (Trainer, "_save_optimizer_and_scheduler", at_step, {"before": die}),
        "no state yet": (TrainerState, "save_to_json", state_at_step, {"before": die}),
        "half a state": (TrainerState, "save_to_json", state_at_step, {"before": half_a_state}),
        "saved": (Trainer, "_save_checkpoint", at_step, {"after": die}),
    }
    if point in points:  # The reward sees to itself.
        owner, name, when, what = points[point]
        around(owner, name, when, **what)


def live(folder: Path, run: str, number: int, point: str, step: int) -> None:
    """One life of a run, to its end or to the point where it is killed."""
    from trainer import running
    from trainer.hf_server import HFServer
    from trainer_env import models
    from trainer_env.rewards import Reward
    from trainer_env.runs.checkpoints import last_checkpoint

    class Server(HFServer):
        def _publish(self, request: Any, payload: bytes) -> Any:
            note(served=request.version, digest=digest(payload))
            return super()._publish(request, payload)

        def _generate(self, request: Any, version: int) -> Any:
            reply = super()._generate(request, version)
            if request.version >= 0:  # The proof's: when it looks at the prefix cache counts from a life's start.
                return reply
            sampled = hashlib.sha256(repr(reply.completions).encode()).hexdigest()
            note(asked=request.prompt.hex(), version=reply.version, min_version=request.min_version, sampled=sampled)
            return reply

    def note(**facts: Any) -> None:
        with (folder / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"run": run, "life": number, **facts}) + "\n")

    server = Server(models.resolve(running.TINY))

    def reward(*, completion_ids: Any, **_: Any) -> list[float]:
        if point == "rewarding" and server.version == step - 1:
            die()
        return running.low_tokens(completion_ids=completion_ids)

    arrange(point, step, Server)
    config = running.tiny_config(folder, *SETTINGS, run=run)
    resume = last_checkpoint(config.run_dir / "checkpoints") is not None
    running.train(config, server=server, rewards=[Reward("low", reward)], resume=resume)


def main(folder: Path) -> None:
    """Live all lives; each must end as it was meant to."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    from trainer_env.training import grpo

    grpo.import_unsloth()
    import trl  # noqa: F401 (once for all)

    lives = [("whole", 0, "", 0), *(("killed", number, *life) for number, life in enumerate([*LIVES, ("", 0)]))]
    for run, number, point, step in lives:
        child = os.fork()
        if not child:
            live(folder, run, number, point, step)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        meant = -signal.SIGKILL if point else 0
        assert ended == meant, f"life {number} ({point!r} at step {step}) ended with {ended}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
