"""Agents at work: the cache, the record of what they did, and who sees what."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from data.agents.chains import ChainBatch, of_step_before, standardised
from models.actions import Actions
from tests.small import agents
from tests.small.agents import (
    EPISODE_STEPS,
    OBSERVATION_SIZE,
    ONE_TOKEN,
    ROWS,
    Run,
    one_device,
)
from tools.lib.exorl import agents as actors
from tools.lib.exorl.agents import Choice, actor
from tools.lib.exorl.play import Context, Play
from training.sharding.mesh import MeshShape

TARGET = 5.0
FIRST = slice(0, EPISODE_STEPS)
SECOND = slice(EPISODE_STEPS, 2 * EPISODE_STEPS)


class Toy:
    """Rows whose observations follow from the actions.

    lengths: steps of each row's episodes, by their seed; others have EPISODE_STEPS.
    """

    def __init__(self, lengths=None):
        self._lengths = lengths or {}

    def reset(self, *, seed):
        self._rng = np.random.default_rng(seed)
        self._observations = self._rng.normal(3, 2, (ROWS, OBSERVATION_SIZE))
        self._left = np.array(self._lengths.get(seed[0], [EPISODE_STEPS] * ROWS))
        return self._observations, {}

    def step(self, actions):
        self._left -= 1
        self._observations = 0.5 * self._observations + actions.sum(axis=1)[:, None]
        rewards = self._rng.uniform(size=ROWS) + np.square(actions).mean(axis=1)
        never = np.zeros(ROWS, bool)
        return self._observations, rewards, self._left <= 0, never, {}


def episodes(*numbers, lengths=None):
    """Episodes of these seeds in one scene."""
    toy = Toy(lengths)
    return [(toy, np.full(ROWS, number)) for number in numbers]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return agents.make_trajectories(tmp_path_factory.mktemp("data"))


def acting(attention="striped", **fields):
    """An agent on a ring of 4, which takes the likeliest action."""
    run = Run(MeshShape(ring=4), attention, **fields)
    sizes = {"rows": ROWS, "episodes": 2, "temperature": 0.0}
    return actor(run.run, run.parameters, **sizes)


@pytest.fixture(scope="module")
def agent():
    return acting()


@pytest.fixture(scope="module")
def one_token():
    return acting(**ONE_TOKEN)


class Played(NamedTuple):
    """Returns (rows, episodes), and all steps, (rows, steps, …) each."""

    returns: np.ndarray
    steps: ChainBatch


def played(agent, file, forgets=False, scenes=None, window=None, **options):
    context = Context(scenes or episodes(0, 1), forgets=forgets, **options)
    play = Play(agent, file, np.full(ROWS, TARGET), window)
    return Played(play.play(context), play.steps())


def part_of(steps, part):
    return jax.tree.map(lambda x: x[:, part], steps)


def whole_forward(steps, **overrides):
    """Actions that the model predicts for recorded steps, all at once."""
    one = one_device(**overrides)
    length = steps.positions.shape[1]
    size = one.run.shape[1]

    def pad(x):
        return np.pad(x, [(0, 0), (0, size - length)] + [(0, 0)] * (x.ndim - 2))

    positions = np.tile(np.arange(size, dtype=np.int32), (ROWS, 1))
    padded = jax.tree.map(pad, steps)._replace(positions=positions)
    return one.actions(padded)[:, :length]


def assert_as_the_whole_forward(steps, fields, part=slice(None), is_short=False):
    """What was acted with a cache is what the model predicts of all steps at once.

    is_short: whether there are too few steps to say that they differ.
    """
    acted = steps.actions[:, part]
    if not fields:
        want = whole_forward(steps)[:, part]
        np.testing.assert_allclose(acted, want, atol=1e-4)
        assert is_short or (np.abs(want).max() > 0.3 and want.std() > 0.1)
        return
    logits = whole_forward(of_step_before(steps), **fields)[:, part]
    np.testing.assert_array_equal(acted.argmax(-1), logits.argmax(-1))
    assert (acted.sum(axis=-1) == 1).all()
    assert is_short or 0.2 < acted[..., 0].mean() < 0.8
    margin = np.abs(logits[..., 0] - logits[..., 1])
    assert np.median(margin) > 1e-2  # so that the cache's error would not show


KINDS = {"four tokens": {}, "one token": ONE_TOKEN}


@pytest.mark.parametrize(
    "kind", ["four tokens", pytest.param("one token", marks=pytest.mark.thorough)]
)
def test_cached_actions_are_those_of_the_teacher_forced_forward(
    agent, one_token, file, kind
):
    steps = played(one_token if KINDS[kind] else agent, file).steps
    assert_as_the_whole_forward(steps, KINDS[kind])
    # Of one token, the second episode begins with the last reward of the first.
    known = of_step_before(steps).rewards[:, EPISODE_STEPS]
    np.testing.assert_array_equal(known, steps.rewards[:, EPISODE_STEPS - 1])
    assert (known > 0).all()


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        ("striped", {}),
        ("ring", ONE_TOKEN),
        ("striped", ONE_TOKEN | {"implementation": "blockwise"}),
    ],
    ids=["four tokens", "one token", "in tiles"],
)
def test_a_prompt_read_at_once_is_one_seen_step_by_step(file, attention, fields):
    agent = acting(attention, **fields)
    predicted, program = [], agent.program
    agent.program = lambda *arguments: kept(predicted, program(*arguments))
    steps = played(agent, file).steps
    want = np.stack(predicted[EPISODE_STEPS:], axis=1)
    predicted.clear()
    agent.forget()
    agent.read(part_of(steps, FIRST))
    for place in range(EPISODE_STEPS, 2 * EPISODE_STEPS):
        agent.act(part_of(steps, place))
        agent.learn(part_of(steps, place))
    np.testing.assert_allclose(np.stack(predicted, axis=1), want, atol=1e-4)
    assert np.abs(want).max() > 0.3


def kept(predicted, result):
    predicted.append(np.asarray(result[0]))
    return result


def test_a_context_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(actors, "device_memory", lambda device: 100)
        with pytest.raises(
            ValueError, match="16 tokens in 2 env.* take .* GB: give fe"
        ):
            acting(**ONE_TOKEN)
    device = jax.devices()[0]
    assert 1e8 < actors.device_memory(device) < 1e13


@pytest.mark.parametrize(
    ("lengths", "options", "said"),
    [
        (
            [EPISODE_STEPS] * 3,
            {},
            "at most 16 steps, and an episode .*=7, got 17 and 3",
        ),
        ([EPISODE_STEPS + 1] * 2, {}, "agent.episode_steps=7, got 8 and 8"),
        ([EPISODE_STEPS + 1, 1], {"drawn": 1}, "episode_steps=7, got 8 and 8"),
    ],
    ids=["a third episode", "a long one", "a long prompt"],
)
def test_steps_that_a_context_has_no_room_for_are_refused(
    agent, file, lengths, options, said
):
    """Else they would overwrite others, and the returns be printed."""
    lengths = {number: [steps] * ROWS for number, steps in enumerate(lengths)}
    scenes = episodes(*lengths, lengths=lengths)
    with pytest.raises(ValueError, match=said):
        played(agent, file, scenes=scenes, **options)


def choice(actions: Actions, temperature: float = 1, hold: int = 1) -> Choice:
    return Choice(actions, temperature, np.random.default_rng(0), hold)


def test_temperature_is_that_of_what_is_drawn():
    shares = np.array([0.7, 0.2, 0.1])
    logits, root = np.tile(np.log(shares), (20_000, 1)), np.sqrt(shares)
    for temperature, want in ((1, shares), (2, root / root.sum()), (0, [1, 0, 0])):
        choose = choice(Actions("discrete", 3, 2), temperature)
        np.testing.assert_allclose(choose(logits).mean(axis=0), want, atol=0.01)
    actions = np.array([[0.3, -0.2]])
    assert choice(Actions("continuous", 2, 2))(actions) is actions
    # Of binned actions, number by number.
    shares = np.array([[0.5, 0.0, 0.5], [0.1, 0.2, 0.7]])  # (A, K)
    logits = np.log(np.maximum(shares, 1e-9)).reshape(1, -1)
    drawn = choice(Actions("binned", 2, 3))(np.tile(logits, (20_000, 1)))
    found = (drawn[..., None] == [-1, 0, 1]).mean(axis=0)
    np.testing.assert_allclose(found, shares, atol=0.01)
    assert choice(Actions("binned", 2, 3), 0)(logits).tolist()[0][1] == 1


def test_noise_may_be_held_for_several_actions():
    choose = choice(Actions("discrete", 4, 2), hold=3)
    drawn = np.stack([choose(np.zeros((500, 4))).argmax(-1) for _ in range(6)])
    assert (drawn.reshape(2, 3, 500) == drawn[[0, 3], None]).all()
    assert (drawn[0] != drawn[3]).mean() > 0.6
    # What is certain is done, whatever was drawn before.
    sure = np.eye(4)[[2]].repeat(500, axis=0) * 100
    assert (choose(np.zeros((500, 4))).argmax(-1) != 2).any()
    assert (choose(sure).argmax(-1) == 2).all()


def test_an_empty_context_begins_anew_with_every_episode(agent, file):
    steps = played(agent, file, True).steps
    for part in (FIRST, SECOND):
        one = part_of(steps, part)
        want = whole_forward(one._replace(ranks=np.zeros_like(one.ranks)))
        np.testing.assert_allclose(one.actions, want, atol=1e-4)


def test_the_record_is_a_chain(agent, file):
    outcome = played(agent, file)
    steps, rewards = outcome.steps, outcome.steps.rewards.reshape(ROWS, 2, -1)
    np.testing.assert_allclose(outcome.returns, rewards.sum(axis=-1), rtol=1e-5)
    had = np.cumsum(rewards, axis=-1) - rewards
    left = steps.returns_to_go.reshape(had.shape)
    np.testing.assert_allclose(left, TARGET - had, atol=1e-4)
    assert steps.timesteps[0].tolist() == 2 * list(range(EPISODE_STEPS))
    reached = outcome.returns >= TARGET
    marks = steps.completions.reshape(had.shape)
    np.testing.assert_array_equal(marks[..., -1], reached)
    assert not marks[..., :-1].any()
    standard = standardised(file, Toy().reset(seed=[0] * ROWS)[0])
    np.testing.assert_allclose(steps.observations[:, 0], standard, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [{}, {"drawn": 1}, {"window": 2}], ids=str)
def test_episodes_that_end_early_leave_rows_as_if_they_had_been_alone(
    agent, one_token, file, kind, prompt
):
    """Rows wait for the others' episodes, and see nothing of that."""
    lengths = {0: [1, EPISODE_STEPS], 1: [EPISODE_STEPS, 2], 2: [2, 3]}
    acts = one_token if KINDS[kind] else agent
    numbers = (0, 1, 0, 2) if "window" in prompt else (0, 1)
    scenes = episodes(*numbers, lengths=lengths)
    returns, steps = played(acts, file, scenes=scenes, **prompt)
    there = steps.loss_weights > 0
    expected = np.sum([lengths[number] for number in numbers[-2:]], axis=0)
    np.testing.assert_array_equal(there.sum(axis=1), expected)
    assert (np.diff(there, axis=1) == 0).sum() >= there.size - 2 * ROWS
    # In a window, positions and ranks begin again.
    assert (steps.positions == np.arange(there.shape[1])).all()
    assert set(steps.ranks[there]) == {0, 1}
    begins = (steps.timesteps == 0) & there
    assert begins.sum(axis=1).tolist() == [2] * ROWS and begins[:, 0].all()
    kept = np.where(there, steps.rewards, 0).sum(axis=1)
    np.testing.assert_allclose(kept, returns[:, -2:].sum(axis=1), rtol=1e-5)
    for row, count in enumerate(expected):
        part = slice(lengths[numbers[-2]][row] if prompt else 0, count)
        one = jax.tree.map(lambda x, row=row: x[[row] * ROWS], steps)
        assert_as_the_whole_forward(one, KINDS[kind], part, is_short=True)
