"""A reward for what a regular expression finds, that no text can keep busy for ever."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_env.rewards.completions import Completion, RewardFunction, RowError, bounded, text_of

_PROGRAM = Path(__file__).with_name("match_pattern.py")


def regex(*, pattern: str, whole: bool = False, seconds: float = 5.0) -> RewardFunction:
    """1 if the pattern is found in the completion; whole: only if it covers all of it, white space around it aside.

    seconds: what one completion may take; a pattern that backtracks for longer is an error.
    """
    re.compile(pattern, re.DOTALL)
    if not seconds > 0:
        raise ValueError(f"seconds: expected more than 0, got {seconds}")

    @bounded
    def reward(*, completions: Sequence[Completion], **_: Any) -> list[float]:
        texts = [text_of(completion).strip() for completion in completions]
        job = json.dumps({"pattern": pattern, "whole": whole, "seconds": seconds, "texts": texts})
        ended = subprocess.run(
            [sys.executable, "-I", "-S", _PROGRAM], input=job, capture_output=True, text=True, check=False
        )
        lines = ended.stdout.split()
        if len(lines) < len(texts):
            row = len(lines)
            if ended.returncode > 0:
                raise RowError(row, f"the pattern cannot be searched for: {ended.stderr.strip().splitlines()[-1]}")
            raise RowError(row, f"the pattern takes more than {seconds:g} s on it")
        return [float(line) for line in lines]

    return reward
