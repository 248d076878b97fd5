"""Kinds of optimizers, and of what they store where: fields of `config.optimizer`."""

KINDS: dict[str, dict[str, str]] = {
    "adamw": {},
    "adamw-host": {"placement": "host"},
    "adamw-bfloat16": {"moments": "bfloat16"},
    "adamw-float8": {"moments": "float8"},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "muon-float8": {"name": "muon", "moments": "float8"},
    "bfloat16": {"parameters": "bfloat16"},
    "all": {"placement": "host_all"},
    "least": {"moments": "float8", "parameters": "bfloat16", "placement": "host"},
}
