"""The example of docs/monitoring, as far as tests look at it."""

import json
import re
from collections.abc import Iterable

from served import ROOT

FOLDER = ROOT / "docs" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "tandem.json"


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def shown(prefix: str) -> set[str]:
    """Samples with this prefix that the dashboard asks for."""
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    asked += [variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable]
    return named("\n".join(asked), [prefix])


def named(text: str, prefixes: Iterable[str]) -> set[str]:
    """Names in a text that begin with one of these."""
    return set(re.findall(rf"(?<![\w:])(?:{'|'.join(prefixes)})\w+", text))
