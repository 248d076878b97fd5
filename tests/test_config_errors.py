"""Errors call the fields of a config by their names there."""

import dataclasses

import pytest

from configs import agents, base
from models.memory import Execution
from models.rope import RopeScaling
from tasks.config_errors import OTHER_NAMES, fields_by_name, in_words_of, raise_all
from training.guard import GuardSettings
from training.mesh import MESH_AXES
from training.optimizer import OptimizerSettings, Storage

NAMES = list(fields_by_name(base.get_config()))


def test_what_is_made_of_a_config_has_no_name_that_the_config_lacks():
    known = [name.split(".")[-1] for name in NAMES]
    assert len(known) == len(set(known)) > 70
    made = OptimizerSettings, Storage, GuardSettings, RopeScaling, Execution
    fields = {field.name for kind in made for field in dataclasses.fields(kind)}
    fields = fields - {"storage"} | {*MESH_AXES}
    assert fields <= {*known, *OTHER_NAMES}
    assert {name.removeprefix("config.") for name in OTHER_NAMES.values()} <= {*NAMES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.total_steps=0: raise it", "config.train.steps=0: raise it"),
        ("fsdp=0 and ring=3", "config.mesh.fsdp=0 and config.mesh.ring=3"),
        ("agent.chain_length=3", "config.agent.chain_length=3"),
        ("lower warmup_steps", "lower config.optimizer.warmup_steps"),
        ("the ring of 4, a factor, data", None),
        ("config.mesh.fsdp=0", None),
        ("/runs/head_dim/x and other.head_dim=3", None),
    ],
)
def test_a_field_is_called_as_in_the_config(text, expected):
    assert in_words_of(agents.get_config(), text) == (expected or text)


def test_all_that_is_wrong_is_said_once():
    def wrong(what: str):
        raise ValueError(what)

    with pytest.raises(ValueError, match="^one; two$"):
        raise_all([lambda: wrong("one"), lambda: wrong("two"), lambda: wrong("one")])
    raise_all([lambda: None])
