"""Published weights in and out: from and to models as Hugging Face has them.

    python -m tools.convert_hf import Llama-2-7b-hf runs/llama2_7b
    python train.py --config=configs/fine_tune.py:runs/llama2_7b ...
    python -m tools.convert_hf export runs/mine Mine-7b-hf --like Llama-2-7b-hf

Imports LLaMA, Mistral, Ministral, Qwen 2 to 3.5, Gemma 1 to 3, OLMo 2 and 3, SmolLM3,
Granite 3, Seed-OSS, Phi-3 and Phi-4, and models with experts (docs/experts.md), from
safetensors, in float32, bfloat16 or float16.
Every device reads its own part of every tensor from the files; a host holds only the
parts of its devices. Exports the parameters of a run's newest checkpoint, as the family
of `--like`, or the first that can hold the model.
Adapters are merged into them, or with `--adapter` written alone, in PEFT's format;
`import ADAPTER WORKDIR --weights DIR` reads PEFT's adapters of the weights in DIR.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import logging
from flax import traverse_util
from tqdm import tqdm

from configs import base
from data.document_mask import DocumentMask
from data.files import new_directory, refuse_existing
from data.json_text import read_json_object
from data.progress import progress
from data.remote import as_path
from data.text.tokens.tokenizer_files import read_chat_template, write_tokenizer
from models.abstract import Model
from models.lora import Lora
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tasks import corpora, run_config, state
from tasks.command_line import Parser, as_program
from tasks.text import TextRun
from tools.generate import find_tokenizer
from tools.lib.hf import adapters, names
from tools.lib.hf import config as hf_config
from tools.lib.hf.experts import draft_layers
from tools.lib.hf.names import Weight
from tools.lib.hf.reading import load
from tools.lib.hf.tensor_files import TensorFiles, write_tensors
from training.saved.weights import SavedParameters, save_parameters
from training.sharding.mesh import MeshShape, Partition, make_mesh

COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "chat_template*"),
    "generation_config.json",
)
"""What `--like` copies besides, so that a model can be used where it arrives."""

DTYPES = ("float32", "bfloat16", "float16")
FILE_BYTES = 5_000_000_000


def import_model(
    source: Path, workdir: Path, partition: Partition, weights: Path | None = None
) -> list[str]:
    """Writes published parameters as step 0 of a new working directory.

    Returns the tensors of other parts of the model, which were left out.

    source: directory with config.json and safetensors files, or with those of PEFT.
    partition: the mesh that the parameters pass through; a run may have another.
    weights: working directory of the model that an adapter of PEFT's belongs to.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged, the model or adapter
        is not one of ours, or a tensor is missing, unknown or of another shape;
        nothing is written.
      FileExistsError: `workdir` is not empty.
    """
    refuse_existing(workdir)
    form = adapters if weights else names
    left_out = []
    fields = _read_config(source, form.CONFIG)
    described_by = form.CONFIG
    with TensorFiles(source, form.TENSORS) as files:
        if weights:
            settings = run_config.read(str(weights))
            described_by = f"{described_by} and the model"
            settings.update(workdir=str(workdir), init_from=str(weights))
            layers = settings.model.num_layers
            lora = adapters.read_lora(fields, [*files.shapes], layers)
            settings.lora.update(dataclasses.asdict(lora))
        else:
            config = hf_config.model_config(fields)
            if fields["model_type"] in hf_config.WITH_IMAGES:
                left_out = files.rename(names.text_name)
            drafts = draft_layers(hf_config.text_fields(fields))
            if count := files.leave_out(drafts):
                print(f"left out: {count} tensors of layers that draft tokens ahead")
            if widened := files.dequantise():
                print(f"dequantised: {widened} tensors of MXFP4, which are float32 now")
            if config.num_layers > len(files.shapes):  # before their names are made
                raise ValueError(
                    f"config.json has num_hidden_layers={config.num_layers}, but the "
                    f"files hold {len(files.shapes)} tensors in all: copy the model "
                    "again"
                )
            settings = _settings(config, workdir=str(workdir))
        run = TextRun(settings, partition)
        tensors = _weights(run.model, fields, files.shapes)
        parameters = load(files, tensors, run.model, partition, described_by)
    save_parameters(workdir, parameters, run.fingerprint)
    run_config.write(settings)
    return left_out


def export_model(
    workdir: str,
    directory: Path,
    partition: Partition,
    *,
    dtype: str,
    file_bytes: int = FILE_BYTES,
    original: Path | None = None,
    weights: str | None = None,
    adapter_only: bool = False,
) -> str:
    """Writes the parameters of a run's newest checkpoint as a published model.

    One tensor (of all layers) is read at a time. Adapters are added in. Returns
    what of `original` was changed, or is missing without one, in words; or "".

    Args:
      workdir: of a run, or imported weights.
      directory: where to; it appears whole or not at all.
      partition: the mesh that the parameters pass through.
      dtype: a name of `DTYPES`. bfloat16 rounds to the nearest.
      file_bytes: of the largest file.
      original: whose fields of config.json, and tokenizer, are kept; else the corpus'.
      weights: working directory of what adapters belong to, if it has moved.
      adapter_only: writes the adapters alone, as PEFT does.

    Raises:
      FileNotFoundError, ValueError: there is no checkpoint, it is not a language
        model's, no family (or not that of `original`) has such a model, `dtype` does
        not hold its numbers, or adapters belong to something else or say too little.
      FileExistsError: `directory` is not empty.
    """
    refuse_existing(directory)
    kept = {} if original is None else _read_config(original, names.CONFIG)
    source = SavedParameters(workdir)
    config = _exported_sizes(source, workdir)
    tokens = source.settings.get("data.context_tokens", 0)
    if config.lora.rank:
        kept_config = run_config.read(workdir)
        kept_config.init_from = weights or kept_config.init_from
        source = adapters.Adapted(TextRun(kept_config, partition))
    if adapter_only:
        if not config.lora.rank:
            raise ValueError(
                f"{workdir} holds no adapters: export it without --adapter"
            )
        source.check_alone(config, kept)
        source = source.alone(kept)
        model = source.model
        fields = source.config_fields(original and str(original))
        form = adapters
        file_bytes = sys.maxsize  # PEFT reads one file
    else:
        config = dataclasses.replace(config, lora=Lora())
        fields = hf_config.config_fields(config, dtype, kept, tokens)
        model = TextRun(_settings(config), partition).model
        form = names
    parts = _weights(model, fields)
    sizes = _tensor_bytes(parts, model, dtype)
    size = sum(sizes.values())
    with new_directory(directory) as new, progress(size, "B", "writing") as bar:
        tensors = _tensors(source, parts, model, partition, dtype, bar)
        write_tensors(new, tensors, sizes, file_bytes, form.TENSORS)
        changed = "" if adapter_only else hf_config.context_change(fields, kept)
        if original:
            _copy_companions(original, new)
        elif not adapter_only:
            changed = _write_own_tokenizer(workdir, new, fields)
        (new / form.CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    return changed


def _tensor_bytes(
    weights: Sequence[Weight], model: Model, dtype: str
) -> dict[str, int]:
    """Returns the bytes of each tensor of the published model, by its name."""
    sizes = {}
    for name, shape in names.stored_shapes(weights, model).items():
        own = np.dtype(names.dtype_of(name, dtype))
        sizes[name] = own.itemsize * math.prod(shape)
    return sizes


def _copy_companions(original: Path, directory: Path) -> None:
    """Copies a model's tokenizer, and what else goes with its tensors."""
    for pattern in COMPANIONS:
        for file in filter(Path.is_file, original.glob(pattern)):
            shutil.copyfile(file, directory / file.name)


def _weights(
    model: Model, fields: Mapping[str, Any], tensors: Iterable[str] = ()
) -> tuple[Weight, ...]:
    """Returns where the files that a config describes keep each parameter.

    tensors: their names, if there are files.
    """
    if "peft_type" in fields:
        return adapters.weights_of(model, fields)
    form = hf_config.experts_form(fields, tensors)
    return names.weights_of(model, hf_config.fused(fields), form)


def _write_own_tokenizer(workdir: str, directory: Path, fields: dict[str, Any]) -> str:
    """Writes the tokenizer of a run's corpus; returns what is missing, in words, or "".

    fields: of config.json, which get the ids that begin and end texts.
    """
    try:
        config = run_config.read(workdir)
        tokenizer = find_tokenizer(config, None)
    except (ValueError, OSError) as error:
        return f"without a tokenizer and ids of special tokens (--like): {error}"
    corpus = next(map(Path, corpora.named(config)), Path())
    copy = write_tokenizer(directory, tokenizer, read_chat_template(corpus))
    if copy is None:
        return f"the tokenizer is {tokenizer.name}, which has no file"
    ends = tokenizer.stop_tokens
    begins = tokenizer.begin_of_document
    fields["eos_token_id"] = ends[0] if len(ends) == 1 else [*ends]
    fields["bos_token_id"] = begins[0] if begins else None
    return ""


def _exported_sizes(saved: SavedParameters, workdir: str) -> LanguageModelConfig:
    """Returns the sizes of a saved model, with its run's mask in its layers.

    Raises:
      ValueError: it is not a language model, or config.json cannot say its mask.
    """
    try:
        fields = dict(saved.fingerprint["model"])
        scaling = fields.pop("rope_scaling", {})
        for part in scaling.keys() & {"short_factor", "long_factor"}:
            scaling[part] = tuple(scaling[part])  # JSON has lists
        scaling = RopeScaling(**scaling)
        lora = Lora(**fields.pop("lora", {}))
        config = LanguageModelConfig(**fields, rope_scaling=scaling, lora=lora)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the parameters in {workdir} are not of a language model: {error}"
        ) from error
    mask = saved.settings.get("mask", "causal")
    window = DocumentMask.parse(mask).window
    if window and not config.layer_pattern:
        return dataclasses.replace(config, layer_pattern="w", window=window)
    if mask != "causal":
        raise ValueError(
            f"config.json cannot say config.mask={mask!r} of the run, with "
            f"{config.layer_pattern=}: only a window of all layers is exported"
        )
    return config


def _settings(config: LanguageModelConfig, **fields: Any) -> ml_collections.ConfigDict:
    """Returns the config of `configs/base.py` with this model and these fields."""
    settings = base.get_config()
    settings.update(settings_of(config), **fields)
    return settings


def settings_of(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the sections of a config file that make this model."""
    sizes = dataclasses.asdict(config)
    del sizes["lora"]
    return {"rope_scaling": sizes.pop("rope_scaling"), "model": sizes}


def _read_config(source: Path, name: str) -> dict[str, Any]:
    path = source / name
    if not path.is_file():
        held = "no model"
        if (source / adapters.CONFIG).is_file():
            held = "an adapter: name the workdir of its model with --weights"
        raise FileNotFoundError(f"{path} does not exist: {source} holds {held}")
    return read_json_object(path)


def _narrowed(tensor: np.ndarray, dtype: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = tensor.astype(dtype, copy=False)
    if np.isinf(narrow).any():
        raise ValueError(f"{name} has numbers beyond {dtype}: choose bfloat16")
    return narrow


def _tensors(
    saved: SavedParameters | adapters.Adapted | adapters.Alone,
    weights: Sequence[Weight],
    model: Model,
    partition: Partition,
    dtype: str,
    bar: tqdm,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor of the published model, parameter by parameter.

    bar: counts their bytes.
    """
    abstract = state.abstract_parameters(model.shapes, model.axes, partition)
    leaves = traverse_util.flatten_dict(abstract)
    tensors: dict[tuple, list[Weight]] = {}
    for weight in weights:
        tensors.setdefault((weight.name, weight.numbers), []).append(weight)
    for below in tensors.values():
        parameters = []
        for weight in below:
            tree = traverse_util.unflatten_dict({weight.path: leaves[weight.path]})
            parameters += jax.tree.leaves(saved.restore(tree))
        first = below[0]
        counted = np.ndindex(parameters[0].shape[: first.stacked])
        for index, name in zip(counted, first.names, strict=True):
            parts = [
                weight.to_stored(np.asarray(p[index]))
                for weight, p in zip(below, parameters, strict=True)
            ]
            own = names.dtype_of(name, dtype)
            tensor = _narrowed(first.join(parts), own, name)
            bar.update(tensor.nbytes)
            yield name, tensor


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    ways = parser.add_subparsers(dest="way", required=True)
    add = ways.add_parser("import", help="from Hugging Face's layout").add_argument
    add("source", type=Path, help="directory with config.json and *.safetensors")
    add("workdir", type=as_path, help="directory to write, a new one")
    add("--weights", type=Path, help="workdir that an adapter of PEFT's belongs to")
    add = ways.add_parser("export", help="to Hugging Face's layout").add_argument
    add("workdir", type=os.path.expanduser, help="of a run, or of imported weights")
    add("directory", type=as_path, help="directory to write, a new one")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add(
        "--like",
        type=Path,
        help="model whose tokenizer and fields of config.json are kept",
    )
    add("--adapter", action="store_true", help="the adapters alone, as PEFT has them")
    add("--weights", help="workdir of what adapters belong to, if it has moved")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    logging.set_verbosity(logging.WARNING)  # Orbax logs every step of a save
    partition = Partition(make_mesh(MeshShape(fsdp=-1), jax.devices()))
    if chosen.way == "export":
        changed = export_model(
            chosen.workdir,
            chosen.directory,
            partition,
            dtype=chosen.dtype,
            original=chosen.like,
            weights=chosen.weights,
            adapter_only=chosen.adapter,
        )
        print(f"written to {chosen.directory}{changed and f'; {changed}'}")
        return
    workdir, weights = chosen.workdir, chosen.weights
    left_out = import_model(chosen.source, workdir, partition, weights)
    if left_out:
        parts = ", ".join(sorted({name.split(".")[0] for name in left_out}))
        print(f"left out: {len(left_out)} tensors of images ({parts})")
    if weights:
        print(f"written to {workdir}, adapters of {weights}")
        return
    fields = _read_config(chosen.source, names.CONFIG)
    if unused := hf_config.not_applied(fields):
        print(f"not applied here: {', '.join(unused)}")
    print(f"written to {workdir}; to fine-tune it, with adapters:")
    file = f"configs/fine_tune.py:{workdir}"
    print(f"  python train.py --config={file} --config.data.corpus=CORPUS")


if __name__ == "__main__":
    sys.exit(main())
