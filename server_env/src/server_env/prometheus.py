"""Prometheus text of several engines as one: a label tells them apart, and a metric's lines stay together."""

from collections.abc import Mapping

LABEL = "replica"


def merged(texts: Mapping[int, str]) -> str:
    """One text out of one an engine. Keys: the engines' numbers, which become the label."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line and not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                family = family if family and name.startswith(family) else name
                samples.setdefault(family, []).append(_labelled(line, number))
    families = dict.fromkeys([*comments, *samples])
    return "".join(f"{line}\n" for name in families for line in [*comments.get(name, ()), *samples.get(name, ())])


def _labelled(line: str, number: int) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{{LABEL}="{number}"{"" if rest.startswith("}") else ","}{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{{LABEL}="{number}"}} {value}'
