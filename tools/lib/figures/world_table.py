"""The numbers of a picture of `worlds` in Markdown, and what own episodes are above.

Intervals (95 %) are over worlds and seeds. Differences are of the same seeds in the
same worlds.
"""

from collections.abc import Iterator

import numpy as np

from tools.lib.exorl.scores import interval
from tools.lib.figures.worlds import LOOKS, RANDOM, Runs, references, returns_of

EPISODES = 1, 2, 4, 6, 10, 20, 40
"""Those that are shown, besides the last one."""


def table(tasks: dict[str, dict[str, Runs]]) -> str:
    """Returns a table of each task, of what `worlds.read` returned."""
    return "\n\n".join(_of_task(task, agents) for task, agents in tasks.items())


def _of_task(task: str, agents: dict[str, Runs]) -> str:
    rows = {}
    for name, runs in agents.items():
        for words, found in _rows(runs):
            seeds = f"{len(found)} seed{'s' * (len(found) > 1)}"
            rows[f"{name}, {seeds}, {words}"] = found
    last = max(found.shape[-1] for found in rows.values())
    shown = [*(episode for episode in EPISODES if episode < last), last]
    cells = {
        words: [_cell(found, episode - 1) for episode in shown]
        for words, found in rows.items()
    }
    lines = [[task, *map(str, shown)], ["---", *["--:"] * len(shown)]]
    lines += [[words, *each] for words, each in cells.items()]
    known = references(agents)
    for name, words in (("oracle", "knows the world"), ("random", "random")):
        lines.append([words, *[""] * (len(shown) - 1), f"{known[name]:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(runs: Runs) -> Iterator[tuple[str, np.ndarray]]:
    """Yields words and numbers (seeds, worlds, episodes), NaN where there are none."""
    there = {context for run in runs for context in run["contexts"]}
    for context, (words, _) in LOOKS.items():
        if context not in there:
            continue
        yield words, _returns(runs, context)
        both = [run for run in runs if {"own", context} <= run["contexts"].keys()]
        if not both:
            continue
        own, found = _returns(both, "own"), _returns(both, context)
        if context == "own":
            yield "own above the first", own - own[..., :1]
        else:
            last = min(own.shape[-1], found.shape[-1])
            yield f"own above {words}", own[..., :last] - found[..., :last]
    for context in sorted(there, key=lambda name: (len(name), name)):
        if context.startswith(RANDOM):
            count = context.removeprefix(RANDOM)
            yield f"after {count} of drawn actions", returns_of(runs, context)


def _returns(runs: Runs, context: str) -> np.ndarray:
    """Returns what the agents got, behind NaN for what was played for the context."""
    found = returns_of(runs, context)
    if context != "other":
        return found
    [run, *_] = (run for run in runs if context in run["contexts"])
    before = len(run["contexts"][context]["recorded_returns"][0])
    return np.pad(found, [(0, 0), (0, 0), (before, 0)], constant_values=np.nan)


def _cell(found: np.ndarray, episode: int) -> str:
    if episode >= found.shape[-1] or np.isnan(found[..., episode]).any():
        return ""
    bounds = interval(found[..., episode])
    return "{mean:.1f} ({low:.1f} to {high:.1f})".format(**bounds)
