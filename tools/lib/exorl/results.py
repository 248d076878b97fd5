"""Results that `tools.evaluate exorl` wrote, by task, agent and seed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from configs import agents as agents_config
from data.json_text import parse_json, short
from tasks import exorl
from tasks.config_errors import fields_by_name
from tools.lib.exorl.scores import of_worlds
from training.saved.stored_step import differences

CONTEXTS = {
    "own": ("own episodes before", "-"),
    "empty": ("emptied before every episode", "--"),
    "none": ("emptied before every step", ":"),
    "recorded": ("recorded episodes before", "o"),
    "other": ("another task's or world's episodes before", "x"),
}
"""Words and look of each context."""
RANDOM = "random_"
"""Beginning of the names of contexts with drawn episodes; their number follows."""

TRAINED_BY = (
    *(f"data.{name}" for name in exorl.DATA_FIELDS if name != "trajectories"),
    *("data.batch_rows", "data.context_tokens", "train.steps"),
)
"""Fields that make an agent, besides those of its model and optimizer."""

Runs = list[dict[str, Any]]
"""Results of one agent in one task, of several seeds."""


def agent(results: dict[str, Any]) -> str:
    """Returns the name of the method that trained the agent."""
    made = results["config"]["agent"]
    data = results["config"]["data"]
    sees_one = results["config"].get("model", {}).get("window") == 1
    # The imitators of results/2026-11-21-in-context-rl.md were perceptrons.
    if sees_one or made.get("method") == "perceptron":
        return "behaviour cloning"
    if made["chain_length"] == 1:
        return "Decision Transformer"
    if data.get("predict") == "targets":
        return "Decision-Pretrained Transformer"
    if data["chain_order"] == "learnt":
        return "Algorithm Distillation"
    is_sorted = data["chain_order"] == "ascending"
    return "Agentic Transformer" + ("" if is_sorted else ", unsorted chains")


def read_returns(files: Sequence[Path]) -> dict[str, dict[str, Runs]]:
    """Returns results of `evaluate exorl` by task and agent, a mean for each world.

    files: one for each agent and seed, or for some contexts of it.

    Raises:
      ValueError: a file holds no results, a context of a seed twice, or results whose
        mean with the other files' would mean nothing.
    """
    by_task: dict[str, dict[str, Runs]] = {}
    for file in files:
        try:
            results = _by_world(parse_json(Path(file).read_text()))
            name = agent(results)
            seed = results["config"].setdefault("seed", 0)
            agents = by_task.setdefault(results["task"], {})
            for other, runs in agents.items():
                for run in runs:
                    _check_alike(run, results, is_same_agent=other == name)
            runs = agents.setdefault(name, [])
            same = [run for run in runs if run["config"]["seed"] == seed]
            there = {context for run in same for context in run["contexts"]}
            if both := sorted(there & set(results["contexts"])):
                raise ValueError(
                    f"{name} with seed {seed} in {results['task']} has "
                    f"{', '.join(both)} already: give each context of a seed once"
                )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{file} holds no results of tools.evaluate exorl, or not of the kind "
                f"of the other files ({type(error).__name__}: {error})"
            ) from error
        if same:
            same[0]["contexts"] |= results["contexts"]
            known = same[0]["references"]
            for reference, new in results["references"].items():
                # An explorer's are of as many episodes as the file's contexts have.
                known[reference] = max(known.get(reference, new), new, key=np.size)
        else:
            runs.append(results)
    return by_task


def _by_world(results: dict[str, Any]) -> dict[str, Any]:
    """Returns results with the mean of the rows of each world, and how each was drawn.

    Raises:
      ValueError, KeyError, TypeError: they have another form, or are of worlds that
        the agent was trained on.
    """
    contexts = results["contexts"]
    if not contexts:
        raise ValueError("it has no contexts")
    split = "train" if results.get("trained_on") else results.get("split", "test")
    if split != "test":
        raise ValueError(f"its worlds are of split {split}: leave out --split")
    drawn = results.get("temperature", 1.0), results.get("hold", 1)
    how = "temperature {} held for {}, window {}".format(*drawn, results.get("window"))
    results.setdefault("references", {})
    for name, outcome in contexts.items():
        returns = np.array(outcome["returns"], float)
        if returns.ndim != 2 or not returns.size or not np.isfinite(returns).all():
            raise ValueError(
                f"returns of shape {returns.shape} must be finite, (rows, episodes)"
            )
        # Rows that do not name their worlds are of one each.
        of_rows = np.array(results.get("worlds", range(len(returns))))
        # Rows of one world stay, for an interval; they are independent of each other.
        is_one = len(np.unique(of_rows)) == 1
        groups = np.arange(len(returns)) if is_one else of_rows
        outcome["returns"] = of_worlds(returns, groups)
        # The best of a row's episodes, and not of their mean; a summary has it.
        best = returns[:, : max(returns.shape[1] - 1, 1)].max(axis=1)
        best = np.array(outcome.get("best_before", best), float)
        outcome["best_before"] = of_worlds(best, groups)
        before = len(outcome["recorded_returns"][0])
        outcome["before"] = before
        means = f"{len(outcome['returns'])} worlds or rows"
        outcome["drawn"] = f"{before} + {returns.shape[1]} episodes, {how}, {means}"
        if not name.startswith(RANDOM):
            CONTEXTS[name]
    results["worlds"] = np.unique(of_rows).tolist()
    return results


def _check_alike(
    before: dict[str, Any], results: dict[str, Any], is_same_agent: bool
) -> None:
    """Raises ValueError if no picture can have these results beside earlier ones.

    Of one task the worlds must be the same, and of one agent all that made it.
    """
    both = before, results
    facts = [{name: x.get(name) for name in ("worlds", "target")} for x in both]
    if is_same_agent:
        contexts = before["contexts"].keys() & results["contexts"].keys()
        digests = ["trajectories"]
        if before["config"]["seed"] == results["config"]["seed"]:
            digests.append("parameters")
        if not all("digests" in x for x in both):
            digests.clear()
        for fact, x in zip(facts, both, strict=True):
            fact |= _settings(x) | {name: x["digests"][name] for name in digests}
            fact |= {repr(name): x["contexts"][name]["drawn"] for name in contexts}
    for name, (old, new) in differences(*facts).items():
        raise ValueError(f"{name} is {short(new)}, in another file {short(old)}")


def _settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that make an agent, by name; older results get defaults."""
    given = fields_by_name(ml_collections.ConfigDict(results["config"]))
    fields = fields_by_name(agents_config.get_config()) | given
    settings = {
        name: value
        for name, value in fields.items()
        if (name.split(".")[0] in ("agent", "model", "optimizer") or name in TRAINED_BY)
    }
    return settings | {"step": results.get("step")}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Returns results with means of each world's rows, without the rows' own numbers.

    What makes the agent, its versions and scores stay; the seed of each episode goes.

    Raises:
      ValueError, KeyError, TypeError: as `_by_world`.
    """
    kept = {name: value for name, value in results.items() if name != "seeds"}
    kept = _by_world(kept)
    for outcome in kept["contexts"].values():
        outcome["returns"] = outcome["returns"].round(4).tolist()
        outcome["best_before"] = outcome["best_before"].round(4).tolist()
        recorded = np.array(outcome["recorded_returns"], float)
        outcome["recorded_returns"] = [recorded.mean(axis=0).round(4).tolist()]
        for name in ("before", "drawn"):
            del outcome[name]
    return kept
