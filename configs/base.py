"""Every field of a config, its unit and meaning. Other configs say only what differs.

Run a config with `python train.py --config=configs/NAME.py`, and change any field on
the way with `--config.section.field=value`. Unknown fields are refused.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    # "text" trains a LLaMA; "exorl", an agent on packed trajectories, whose further
    # fields are in configs/agents.py.
    config.task = "text"
    # Directory of checkpoints, curves and the config itself; a run that finds its own
    # checkpoint there resumes. Local, or a bucket ("gs://…").
    config.workdir = "runs/base"
    # Source of a new run's parameters: the workdir of another run, or one written by
    # tools/convert_hf.py; the optimizer starts over. "": random parameters.
    config.init_from = ""
    # Fields that may differ from the saved ones: with init_from, fields of the model,
    # as ("rope_theta", "rope_scaling"); when a run resumes, the fields that choose the
    # data of a step: "seed" and those of config.data.
    config.may_change = ()
    # Of the initial parameters and of the order of the data.
    config.seed = 0
    # Where curves go beside WORKDIR/metrics.jsonl: "tensorboard", "wandb" (Weights &
    # Biases, from requirements-wandb.txt; WANDB_MODE=offline for later).
    config.metrics = ("tensorboard",)
    # CPU devices to simulate, for a try without accelerators; 0: the devices there are.
    config.simulated_devices = 0

    # The processes of a run on many hosts; Cloud TPU, GKE, SLURM and Open MPI know them
    # by themselves. Elsewhere: HOST:PORT of the first, how many there are, and which of
    # them this one is, from 0.
    config.hosts = ml_collections.ConfigDict()
    config.hosts.coordinator = ""
    config.hosts.count = 0
    config.hosts.index = -1
    # How long they wait for each other at the start, and how long one may be silent
    # before the others end without it.
    config.hosts.start_seconds = 300
    config.hosts.lost_seconds = 100

    # The attention system: vanilla, memory_efficient, blockwise (also the feed-forward
    # in chunks), ring (sequence sharded, contiguous), striped or zigzag (also
    # balanced). The first three need mesh.ring = 1.
    config.attention = "striped"
    # Tokens of a stripe block: consecutive ones on a device in the striped layout.
    config.stripe_granule = 1
    # Attention kernel: "pallas_tpu", "hopper", "hopper_deterministic", "triton",
    # "blockwise", "reference" (see kernels/backends), or "": the best of the device.
    config.implementation = ""

    # Tokens see this part of their document, within the windows of the model's layers:
    # "causal"; "window(N)", the last N tokens at most; or "prefix(N)": the first N
    # tokens of every document see each other, and are not predicted.
    config.mask = "causal"

    config.model = ml_collections.ConfigDict()
    # Ids that the model knows, V. 0: those of the corpus's tokenizer, rounded up to a
    # multiple of 8 (bytes: 264).
    config.model.vocab_size = 0
    config.model.hidden_size = 2048
    config.model.feed_forward_size = 5504
    config.model.num_layers = 22
    config.model.num_heads = 16
    # Key/value heads; num_heads must be a multiple.
    config.model.num_kv_heads = 16
    config.model.head_dim = 128
    # Base of RoPE's frequencies.
    config.model.rope_theta = 10_000.0
    config.model.norm_epsilon = 1e-6
    # The fields below make models of other families; see models/sizes.py.
    # Kinds of the layers, repeated over them: "w" sees a window, "f" all; "" is "f".
    config.model.layer_pattern = ""
    # Tokens that a query of "w" layers sees, its own included.
    config.model.window = 0
    # Base of RoPE in "w" layers, which is not scaled there; 0: as in the others.
    config.model.window_rope_theta = 0.0
    # Factor on the scores; 0: head_dim^-0.5. Cap c of c · tanh(score / c); 0: none.
    config.model.attention_scale = 0.0
    config.model.attention_soft_cap = 0.0
    # A logit of each head for a key whose value is 0.
    config.model.attention_sinks = False
    config.model.qkv_bias = False
    config.model.output_bias = False
    # Norms of queries and keys: "", of each "head", or of "all" heads at once.
    config.model.qk_norm = ""
    # "before" attention and feed-forward, "after" them, or "both".
    config.model.norms = "before"
    # Norms multiply by 1 + scale.
    config.model.norm_unit_offset = False
    # Of the feed-forward's gate: "silu" or "gelu_tanh".
    config.model.activation = "silu"
    # Of task "text": whether the head is the embedding, factors on embeddings and
    # logits, and the cap of logits; 0: none.
    config.model.tied_embeddings = False
    config.model.embedding_scale = 1.0
    config.model.logit_scale = 1.0
    config.model.logit_soft_cap = 0.0

    # How RoPE's frequencies are scaled for a longer context than the model's original
    # one (see models/rope.py), with the field names of Hugging Face.
    config.rope_scaling = ml_collections.ConfigDict()
    # none, linear, ntk, yarn or llama3.
    config.rope_scaling.rope_type = "none"
    # The new context over the original one.
    config.rope_scaling.factor = 1.0
    # Tokens of the original context; for yarn and llama3.
    config.rope_scaling.original_max_position_embeddings = 0
    # llama3: frequencies below and above these rotations in the original context are
    # interpolated, or stay.
    config.rope_scaling.low_freq_factor = 1.0
    config.rope_scaling.high_freq_factor = 4.0
    # yarn: the same, the other way round.
    config.rope_scaling.beta_fast = 32.0
    config.rope_scaling.beta_slow = 1.0
    # yarn: factor on queries and keys each; 0: 0.1 ln(factor) + 1.
    config.rope_scaling.attention_factor = 0.0
    # yarn: whether the interpolation begins and ends at whole pairs.
    config.rope_scaling.truncate = True

    # Low-rank adapters of the layers' matrices (LoRA): only they are trained, and
    # saved; the parameters of init_from are frozen, and read again at every start.
    config.lora = ml_collections.ConfigDict()
    # Of the adapters; 0 for none: all parameters are trained.
    config.lora.rank = 0
    # An adapter's output is multiplied by alpha / rank.
    config.lora.alpha = 16.0
    # Matrices that have one.
    config.lora.targets = "q,k,v,o,gate,up,down"
    # Type in which frozen matrices are held: "bfloat16", "float32", or "" for that of
    # compute_dtype, in which they are multiplied.
    config.lora.base_dtype = ""

    # Type of activations and matrix products: "bfloat16" or "float32". Parameters
    # that are trained, and what updates them: see config.optimizer.
    config.compute_dtype = "bfloat16"
    # Results of a layer that are kept for the backward: everything, products,
    # attention, tail, nothing, offload (see models/memory.py).
    config.remat = "attention"
    # Further GiB of a device for kept results: from the last layer on, as many layers
    # as fit keep what the next policy keeps (nothing or tail, attention, products).
    # tools/plan_pod.py --fit-remat finds the largest value.
    config.remat_budget_gib = 0.0
    # Gather parameters while others are used, on TPU v4 and later. On v5p, v6e and
    # later SparseCores run these collectives, and gradients' (see training/overlap.py).
    config.overlap_parameters = True
    # In how many parts a device's key/value heads are attended to, one after the other:
    # queries, keys, values, and what the ring holds, exist for one part at a time.
    config.attention_parts = 1
    # Tokens per device whose feed-forward, or whose logits, exist at a time. 0: chosen
    # for the device (see models/memory.py); layers that keep their products then take
    # all tokens at once. As large as the tokens of a device, or larger: all at once.
    config.feed_forward_chunk_tokens = 0
    config.loss_chunk_tokens = 0

    # Devices along each axis; -1 for all that remain. Batch over data and fsdp,
    # sequence over ring, heads and feed-forward over tensor, parameters over fsdp and
    # ring.
    config.mesh = ml_collections.ConfigDict()
    config.mesh.data = 1
    config.mesh.fsdp = 1
    config.mesh.ring = -1
    config.mesh.ulysses = 1
    config.mesh.tensor = 1

    config.data = ml_collections.ConfigDict()
    # Directory made by tools/prepare_text.py, or several, mixed: "a:0.7,b:0.3" takes 7
    # rows of 10 from a, "a,b" as many of each as it has. "": the source of Python's
    # standard library, prepared on first use.
    config.data.corpus = ""
    # "packed" rows of many documents, cut where a row ends; "whole" documents, as many
    # as fit (for chats); or "documents": one in each row.
    config.data.rows = "packed"
    # Tokens in a row, which are padded to what the ring can shard; of a chain, those of
    # its steps, padded to it at the end.
    config.data.context_tokens = 4096
    # Rows of context_tokens in a step, over all devices.
    config.data.batch_rows = 8
    # Threads that read ahead, and steps they keep ready.
    config.data.threads = 4
    config.data.buffered_steps = 4
    # Compare the files of the data with their digests at the start even where they are
    # larger than 256 MiB, which reads them whole; smaller ones always are.
    config.data.compare_digests = False

    config.optimizer = ml_collections.ConfigDict()
    # "adamw"; "adafactor", which keeps means of rows and columns for a second moment
    # and no first; or "muon" for the layers' matrices and AdamW for the rest. All take
    # the same learning rates.
    config.optimizer.name = "adamw"
    # Type of the moments of matrices: "float32"; "bfloat16" or, in blocks of 256 with a
    # scale, "float8", rounded at random.
    config.optimizer.moments = "float32"
    # Type of the parameters that are matrices, and of their gradients: "float32"; or
    # "bfloat16", to which updates are rounded at random.
    config.optimizer.parameters = "float32"
    # Where the optimizer's state is: on the "device", or in the memory of its "host",
    # from which it passes through the device a layer at a time. "host_all": so do the
    # layers' parameters and gradients.
    config.optimizer.placement = "device"
    config.optimizer.peak_lr = 3e-4
    config.optimizer.end_lr = 3e-5
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.1
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.95
    # Decay of Muon's moment.
    config.optimizer.momentum = 0.95
    config.optimizer.epsilon = 1e-8
    # Largest norm of the gradients.
    config.optimizer.clip_norm = 1.0

    config.train = ml_collections.ConfigDict()
    # Updates in all; the learning rate falls until then.
    config.train.steps = 1000
    # Updates that a run that has made all its steps goes on for when it is started
    # again, at end_lr; 0: it says that there is nothing to do.
    config.train.extra_steps = 0
    # Parts of a batch whose gradients are added up before the update.
    config.train.microbatches = 1
    config.train.log_every_steps = 10
    config.train.validate_every_steps = 100
    # Batches of held-out rows in a validation; 0: no validation.
    config.train.validation_batches = 8

    # Steps to trace for xprof, as in "10-12", beside the curves; "": none.
    config.profile = ""

    config.guard = ml_collections.ConfigDict()
    # Updates whose loss or gradients are not finite are skipped. Also skip those whose
    # loss is above the mean of the last 128 by this many standard deviations (6, say);
    # 0: none.
    config.guard.spike_sigmas = 0.0
    # Skipped updates in a row that end the run.
    config.guard.stop_after = 10
    # Compute a skipped step twice more, to separate hardware faults from those of
    # the data; the run then waits for every step, and needs deterministic kernels.
    config.guard.replay = False
    # A run that makes no step for so long ends, with the stacks of its threads: while
    # it restores, compiles, validates, saves or makes its first two steps; and later,
    # where 10 times its longest step may pass too. 0: for ever.
    config.guard.first_step_seconds = 14400.0
    config.guard.step_seconds = 1800.0

    config.checkpoint = ml_collections.ConfigDict()
    # And after the last step, and at SIGTERM; 0: nothing is saved.
    config.checkpoint.save_every_steps = 100
    # Newest checkpoints that stay on disk.
    config.checkpoint.keep = 3

    return config.lock()
