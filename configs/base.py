"""Every field of a config, its unit and meaning. Other configs say only what differs.

docs/config.md has them in tables, which `make docs` makes from the comments here.

Run a config with `python train.py --config=configs/NAME.py`, and change any field on
the way with `--config.section.field=value`. Unknown fields are refused.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

FIELDS = dict(
    #: The run
    # "text" trains a LLaMA; "exorl", an agent on packed trajectories, whose further
    # fields are in configs/agents.py.
    task="text",
    # Directory of checkpoints, curves and the config itself; a run that finds its own
    # checkpoint there resumes. Local, or a bucket ("gs://…").
    workdir="runs/base",
    # Keep compiled programs in WORKDIR/programs, for the next starts; or, as JAX does,
    # in JAX_COMPILATION_CACHE_DIR.
    keep_programs=True,
    # Source of a new run's parameters: the workdir of another run, or one written by
    # tools/convert_hf.py; the optimizer starts over. "": random parameters.
    init_from="",
    # Fields that may differ from the saved ones: with init_from, fields of the model,
    # as ("rope_theta", "rope_scaling"); when a run resumes, the fields that choose the
    # data of a step: "seed" and those of config.data.
    may_change=(),
    seed=0,  # seed of the initial parameters and of the order of the data
    # Where curves go beside WORKDIR/metrics.jsonl: "tensorboard", "wandb" (Weights &
    # Biases, from requirements/wandb.txt; WANDB_MODE=offline for later).
    metrics=("tensorboard",),
    # Steps to trace for xprof, as in "10-12", beside the curves; "": none.
    profile="",
    # CPU devices to simulate, for a try without accelerators; 0: the devices there are.
    simulated_devices=0,
    # Processes of a run on many hosts. Cloud TPU, GKE with TPUs, SLURM and Open MPI set
    # the first three; give them elsewhere.
    hosts=dict(
        coordinator="",  # HOST:PORT of the first process, the same for all
        count=0,  # processes of the run
        index=-1,  # number of this process, from 0
        start_seconds=300,  # longest wait of the processes for each other at the start
        lost_seconds=100,  # if a process is silent for this long, the others end
    ),
    #: Attention
    # The attention system: vanilla, memory_efficient, blockwise (also the feed-forward
    # in chunks), ring (sequence sharded, contiguous), striped, zigzag or mirror (also
    # balanced), or auto: of ring, striped and zigzag the fastest by estimate, for rows
    # of the corpus. The first three need mesh.ring = 1.
    attention="striped",
    # Tokens of a stripe block: consecutive ones on a device in the striped layout. 0:
    # of a tile on CPUs, where a shard has several of these; 1 elsewhere.
    stripe_granule=0,
    # Attention kernel: "pallas_tpu", "hopper", "hopper_deterministic", "triton",
    # "tokamax", "blockwise", "reference" (see kernels/backends), or "": the best of the
    # device.
    implementation="",
    # What moves a ring's shards between NVIDIA GPUs: "nccl", whose kernels take SMs
    # from attention; or, between the GPUs of one process and untimed so far, "peer",
    # their copy engines, or "symmetric", NCCL's one-sided puts.
    gpu_transfers="nccl",
    # Tokens see this part of their document, within the windows of the model's layers:
    # "causal"; "window(N)", the last N tokens at most; or "prefix(N)": the first N
    # tokens of every document see each other, and are not predicted.
    mask="causal",
    model=dict(
        # Ids that the model knows, V. 0: those of the corpus's tokenizer, rounded up to
        # a multiple of 8 (bytes: 264).
        vocab_size=0,
        hidden_size=2048,  # width of the residual stream
        # Width between the feed-forward's matrices, or those of each expert.
        feed_forward_size=5504,
        num_layers=22,  # decoder layers
        num_heads=16,  # query heads
        num_kv_heads=16,  # key/value heads; num_heads must be a multiple
        head_dim=128,  # numbers of a head
        rope_theta=10_000.0,  # base of RoPE's frequencies
        norm_epsilon=1e-6,  # added to the mean square in RMSNorm
        # This field and all below make models of other families (models/sizes.py).
        # Kinds of the layers, repeated over them: "w" sees a window, "f" all; "": "f".
        # "W" and "F" have no RoPE; "d" has Gated DeltaNet in the place of attention.
        layer_pattern="",
        window=0,  # tokens that a query of "w" layers sees, its own included
        # Base of RoPE in "w" layers, which is not scaled there; 0: as in the others.
        window_rope_theta=0.0,
        rotary_fraction=1.0,  # share of each head's sizes that RoPE rotates
        attention_scale=0.0,  # factor on the scores; 0: head_dim^-0.5
        attention_soft_cap=0.0,  # cap c of c · tanh(score / c); 0: none
        attention_sinks=False,  # a logit of each head for a key whose value is 0
        attention_gate=False,  # multiply the heads' results by sigmoids
        delta_key_heads=0,  # query and key heads of "d" layers
        delta_value_heads=0,  # value heads of "d" layers, a multiple of the key heads
        delta_key_dim=0,  # numbers of a query or key head of "d" layers
        delta_value_dim=0,  # numbers of a value head of "d" layers
        delta_convolution=0,  # tokens that the convolution of "d" layers reads
        qkv_bias=False,  # biases of queries, keys and values
        output_bias=False,  # bias of the attention's output
        qk_norm="",  # norms of queries and keys: of each "head", or of "all" at once
        norms="before",  # "before" attention and feed-forward, "after", or "both"
        norm_unit_offset=False,  # norms multiply by 1 + scale
        residual_scale=1.0,  # factor on what attention and feed-forward add
        # Of the feed-forward's gate: "silu" or "gelu_tanh"; or "clamped", of gpt-oss.
        activation="silu",
        experts=0,  # feed-forwards of a layer; 0: one, which all tokens take
        experts_per_token=0,  # experts that each token takes
        # How a token weighs its experts: by a softmax over the "chosen" ones, over
        # "all", or by "sigmoid", normalised (the choice is by a bias, too).
        router="chosen",
        expert_bias=False,  # biases of the router and of experts' matrices
        shared_expert_size=0,  # width of an expert that all tokens take; 0: none
        shared_expert_gate=False,  # multiply it by a sigmoid
        expert_scale=1.0,  # factor on what the chosen experts add, the shared one aside
        dense_layers=0,  # first layers, which have one feed-forward and no experts
        dense_feed_forward_size=0,  # its width; 0 without such layers
        tied_embeddings=False,  # the head is the embedding (this and below: text only)
        embedding_scale=1.0,  # factor on embeddings
        logit_scale=1.0,  # factor on logits
        logit_soft_cap=0.0,  # cap of logits; 0: none
    ),
    # How RoPE's frequencies are scaled for a longer context than the model's original
    # one (see models/rope.py), with the field names of Hugging Face.
    rope_scaling=dict(
        rope_type="none",  # none, linear, ntk, yarn, llama3 or longrope
        factor=1.0,  # the new context over the original one
        original_max_position_embeddings=0,  # of yarn, llama3, longrope
        # For llama3: frequencies of fewer rotations in the original context are divided
        # by the factor; between this and the next they are interpolated.
        low_freq_factor=1.0,
        high_freq_factor=4.0,  # for llama3: frequencies of more rotations stay
        beta_fast=32.0,  # for yarn: frequencies of more rotations stay
        beta_slow=1.0,  # for yarn: frequencies of fewer are divided by the factor
        # For yarn, longrope: factor on queries and keys each; 0: by the formula, for
        # yarn 0.1 ln(factor) + 1.
        attention_factor=0.0,
        # For yarn: whether the interpolation begins and ends at whole pairs.
        truncate=True,
        # For longrope: what each pair's frequency is divided by, in rows of up to the
        # original context.
        short_factor=(),
        long_factor=(),  # for longrope: and in longer rows
        # b: a query at position p is multiplied by 1 + b ln(1 + p // original context).
        query_scale=0.0,
    ),
    # Low-rank adapters of the layers' matrices (LoRA): only they are trained, and
    # saved; the parameters of init_from are frozen, and read again at every start.
    lora=dict(
        rank=0,  # rank of the adapters; 0: none, all parameters are trained
        alpha=16.0,  # an adapter's output is multiplied by alpha / rank
        targets="q,k,v,o,gate,up,down",  # matrices that have an adapter
        # Rank of the A that gate and up of each expert share, as PEFT's adapters of
        # target_parameters do; 0: each has its own, of the rank above.
        gate_up_rank=0,
        # Type in which frozen matrices are held: "bfloat16", "float32", or "" for that
        # of compute_dtype, in which they are multiplied.
        base_dtype="",
    ),
    #: Memory and types
    # Type of activations and matrix products: "bfloat16" or "float32". Parameters
    # that are trained, and what updates them: see optimizer.
    compute_dtype="bfloat16",
    # Results of a layer that are kept for the backward: everything, gathered, products,
    # attention, nothing, offload (see models/memory.py); or auto: as much as the memory
    # has room for, by estimate (see docs/planning.md).
    remat="attention",
    # Further GiB of a device for kept results: from the last layer on, as many layers
    # as fit keep what the next policy keeps (nothing, attention, products, gathered).
    # tools/plan_pod.py says how much memory is left.
    remat_budget_gib=0.0,
    # Gather parameters, and scatter gradients, beside products: on v5p, v6e and later
    # by SparseCores; on v4 and v5e gradients in permutes
    # (see training/sharding/overlap.py).
    overlap_parameters=True,
    # In how many parts a device's key/value heads are attended to, one after the other:
    # queries, keys, values, and what the ring holds, exist for one part at a time.
    attention_parts=1,
    # Tokens per device whose feed-forward exists at a time. 0: chosen for the device
    # (see models/chunks.py); layers that keep their products then take all tokens at
    # once. As large as the tokens of a device, or larger: all at once.
    feed_forward_chunk_tokens=0,
    # Tokens per device of "d" layers whose states' backward is held at a time, and
    # computed from the state before them; 0: all.
    delta_segment_tokens=0,
    loss_chunk_tokens=0,  # tokens per device whose logits exist at a time; 0: chosen
    # Devices along each axis, and what they share; -1 in one axis for all that remain.
    mesh=dict(
        data=1,  # the batch; each holds a copy of the parameters
        fsdp=1,  # the batch and the parameters
        ring=-1,  # the sequence and the parameters
        ulysses=1,  # each of the ring's shards, and in attention its heads
        tensor=1,  # heads, feed-forward and vocabulary
    ),
    data=dict(
        # Directory made by tools/prepare_text.py, or several, mixed: "a:0.7,b:0.3"
        # takes 7 rows of 10 from a, "a,b" as many of each as it has. "": the source of
        # Python's standard library, prepared on first use.
        corpus="",
        # "packed" rows of many documents, cut where a row ends; "whole" documents, as
        # many as fit (for chats); or "documents": one in each row.
        rows="packed",
        # Tokens in a row, which are padded to what the ring can shard; of a chain,
        # those of its steps, padded to it at the end.
        context_tokens=4096,
        batch_rows=8,  # rows of context_tokens in a step, over all devices
        # Steps whose rows are assigned to these steps by their work, so that rings
        # beside each other (mesh.data, mesh.fsdp) take as long; 16, say. 0: as drawn.
        balanced_steps=0,
        threads=4,  # threads that read ahead; 0: rows are read when a step needs them
        # Compare data above 256 MiB too with their digests, which reads them whole when
        # a run starts. Smaller data always are.
        compare_digests=False,
    ),
    optimizer=dict(
        # "adamw"; "adafactor", which keeps means of rows and columns for a second
        # moment and no first; or "muon" for the layers' matrices and AdamW for the
        # rest. All take the same learning rates.
        name="adamw",
        # Type of the moments of matrices: "float32"; "bfloat16" or, in blocks of 256
        # with a scale, "float8", rounded at random.
        moments="float32",
        # Type of the parameters that are matrices, and of their gradients: "float32";
        # or "bfloat16", to which updates are rounded at random.
        parameters="float32",
        # Where the optimizer's state is: on the "device", or in the memory of its
        # "host", from which it passes through the device a layer at a time. "host_all":
        # so do the layers' parameters and gradients.
        placement="device",
        peak_lr=3e-4,  # largest learning rate
        end_lr=3e-5,  # learning rate of the last step, reached along a cosine
        warmup_steps=100,  # updates in which the learning rate rises to its peak
        weight_decay=0.1,  # of matrices, times the learning rate
        beta1=0.9,  # decay of the first moment
        beta2=0.95,  # decay of the second moment
        momentum=0.95,  # decay of Muon's moment
        epsilon=1e-8,  # added to the root of the second moment
        clip_norm=1.0,  # largest norm of the gradients
    ),
    train=dict(
        steps=1000,  # updates in all; the learning rate falls until then
        # More updates, at end_lr, for a run that is complete and started again; 0: it
        # says that there is nothing to do.
        extra_steps=0,
        microbatches=1,  # parts of a batch whose gradients are added up for the update
        # Factor on the balance loss of experts, a mean over layers (0.001, say; files
        # of Hugging Face say theirs as router_aux_loss_coef); 0: none.
        experts_balance=0.0,
        log_every_steps=10,  # steps between printed lines and points of the curves
        validate_every_steps=100,  # steps between validations
        # Batches of held-out rows in a validation; 0: no validation.
        validation_batches=8,
    ),
    guard=dict(
        # Updates whose loss or gradients are not finite are always skipped. Also skip
        # those whose loss is this many standard deviations (6, say) above the mean of
        # the last 128; 0: no others.
        spike_sigmas=0.0,
        stop_after=10,  # skipped updates in a row that end the run
        # Compute a skipped step twice more, to separate hardware faults from those of
        # the data; the run then waits for every step, and needs deterministic kernels.
        replay=False,
        # A run without progress for this long ends, with the stacks of its threads,
        # while it restores, compiles, validates, saves or makes its first two steps.
        # 0: no limit.
        first_step_seconds=14400.0,
        # The same later, or 10 times its longest step if that is longer.
        step_seconds=1800.0,
    ),
    checkpoint=dict(
        # Steps between checkpoints; the last step and SIGTERM save one too. 0: nothing
        # is saved.
        save_every_steps=100,
        keep=3,  # newest checkpoints that stay on disk
    ),
)


def get_config() -> ConfigDict:
    return ConfigDict(FIELDS).lock()


def check_name(name: str, names: Iterable[str]) -> None:
    """Raises ValueError, with the nearest name, if a config has none of this name."""
    known = [*names]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f". Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is not one of {', '.join(known)}{meant}")


def changed(**fields: Any) -> ConfigDict:
    """Returns the config with other values of these fields, or of these sections'."""
    config = get_config()
    config.update(fields)
    return config
