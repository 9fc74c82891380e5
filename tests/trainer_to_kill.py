"""A trainer as far as its server sees it, for tests that kill it: `python trainer_to_kill.py JOB FOLDER [connect]`.

Starts the run's server; with `connect` it takes the lease, too, and publishes version 3. Then it says so, and waits.
"""

import signal
import sys
from pathlib import Path

import lora_files
from trainer_env.config import load
from trainer_env.devices import Devices
from trainer_env.placement import plan
from trainer_env.serving import Serving


def serving(job: Path) -> Serving:
    """The server of the run that a TOML file describes."""
    config = load(job)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return Serving(config, plan(config.placement, Devices(cores=2)), say=print)


if __name__ == "__main__":
    job, model, *how = sys.argv[1:]
    mine = serving(Path(job))
    mine.start(model, anew=True)
    if how:
        adapter = lora_files.make(Path(model), 3)
        mine.connect().ask(adapter.publish(3), adapter.data)
    print("ready", flush=True)
    signal.pause()
