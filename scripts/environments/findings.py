"""What a check of the doctor says."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
_EXIT: dict[Status, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `failure` means that Tandem cannot run; each but `ok` has a remedy."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def exit_status(findings: list[Finding]) -> int:
    """0 all is well, 1 there are warnings, 2 Tandem cannot run."""
    return max((_EXIT[finding.status] for finding in findings), default=0)
