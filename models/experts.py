"""Mixture of experts: each token takes a few of many feed-forwards (1701.06538).

Letters: n tokens, E hidden size, X experts of width F, K that a token takes. No token
is dropped: the tokens' copies are sorted by expert, and a grouped product multiplies
each expert's rows with its matrix. Experts are gathered whole, as all weights are:
tokens stay where they are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.chunks import scan_chunks
from models.grouped import check_platform, grouped_product
from models.layers import INITIAL_STDDEV, RMSNorm, glu, matrix, zeros
from models.memory import RESIDUAL, Axes, Partition
from models.sizes import DecoderConfig

FORMS: dict[str, Axes] = {
    "router": ("embed", None),
    "router_bias": (None,),
    "gate": ("experts", None, "mlp"),
    "gate_a": (None, "embed", None),
    "gate_b": (None, "embed", "mlp"),
    "gate_bias": (None, "mlp"),
    "up": ("experts", None, "mlp"),
    "up_a": (None, "embed", None),
    "up_b": (None, "embed", "mlp"),
    "up_bias": (None, "mlp"),
    "down": ("experts", "mlp", None),
    "down_a": (None, "mlp", "embed"),
    "down_b": (None, None, "embed"),
    "down_bias": (None, None),
    "shared_gate": ("embed", "mlp"),
    "shared_up": ("embed", "mlp"),
    "shared_down": ("mlp", "embed"),
    "shared_weight": ("embed", None),
}
"""Names of the axes of each parameter; experts come first, then inputs.

Matrices are shared out by expert: so what travels is one piece of memory, and
gradients need no transpose. Where there are more devices than experts, see `_axes`.
"""

SIDES: dict[str, Axes] = {
    "gate": (None, "embed", "mlp"),
    "up": (None, "embed", "mlp"),
    "down": (None, "mlp", "embed"),
}
"""Names of the axes of matrices of fewer experts than the devices divide."""

ROUTED = "gate", "up", "down"
SHARED = "shared_gate", "shared_up", "shared_down"

Whole = dict[str, jax.Array]


class Routing(NamedTuple):
    """The experts of tokens.

    weights: float32 (n, K). chosen: int32 (n, K). loads: float32 (2, X), summed over
    tokens: how many took each expert, and how probable the router found it.
    """

    weights: jax.Array
    chosen: jax.Array
    loads: jax.Array


def route(
    logits: jax.Array, bias: jax.Array | None, router: str, count: int
) -> Routing:
    """Chooses experts for tokens; of equal ones the first.

    logits: float32 (n, X), of the router. bias: (X,), of `sigmoid` alone, for the
      choice. router: of `sizes.ROUTERS`. count: K.
    """
    scores = {
        "chosen": lambda: logits,
        "all": lambda: jax.nn.softmax(logits),
        "sigmoid": lambda: jax.nn.sigmoid(logits),
    }[router]()
    ranked = scores if bias is None else scores + bias
    _, chosen = lax.top_k(lax.stop_gradient(ranked), count)  # (n, K)
    # A mask in place of a gather, whose gradient would be a scatter.
    is_chosen = chosen[..., None] == jnp.arange(logits.shape[1])  # (n, K, X)
    weights = jnp.where(is_chosen, scores[:, None], 0).sum(-1)  # (n, K)
    if router == "chosen":
        weights = jax.nn.softmax(weights)
    if router == "sigmoid":
        weights /= weights.sum(-1, keepdims=True) + 1e-20
        shares = scores / scores.sum(-1, keepdims=True)
    else:
        shares = jax.nn.softmax(logits)
    taken = is_chosen.sum((0, 1), dtype=jnp.float32)
    return Routing(weights, chosen, jnp.stack([taken, shares.sum(0)]))


class _Rows(NamedTuple):
    """The copies of tokens, K of each, in rows that are sorted by expert.

    order: int32 (K · n,), the copy in each row; copy k · n + i is of token i.
    ranks: (K, n), the row of each copy. expert: (K · n,), of each row.
    sizes: (X,), rows of each expert.
    """

    order: jax.Array
    ranks: jax.Array
    expert: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, experts: int) -> "_Rows":
        """Sorts the copies of tokens with these experts, int32 (n, K)."""
        copies = chosen.T  # (K, n)
        numbers = jnp.arange(copies.size, dtype=jnp.int32)
        expert, order = lax.sort((copies.reshape(-1), numbers), num_keys=1)
        # Sorts, and not the scatter that would turn an order around.
        _, ranks = lax.sort((order, numbers), num_keys=1)
        of_expert = copies[..., None] == jnp.arange(experts)  # (K, n, X)
        sizes = of_expert.sum((0, 1), dtype=jnp.int32)
        return cls(order, ranks.reshape(copies.shape), expert, sizes)


@jax.custom_vjp
def _spread(x: jax.Array, rows: _Rows) -> jax.Array:
    """Copies tokens x (n, E) to rows (K · n, E), sorted by expert."""
    return x[rows.order % len(x)]


@jax.custom_vjp
def _combine(y: jax.Array, rows: _Rows) -> jax.Array:
    """Sums the rows y (K · n, E) of each token: (n, E), as y."""
    copies = y[rows.ranks]  # (K, n, E)
    # One after the other: XLA for TPUs takes eight times as long to reduce an axis.
    total = copies[0].astype(jnp.float32)
    for copy in copies[1:]:
        total += copy.astype(jnp.float32)
    return total.astype(y.dtype)


@jax.custom_vjp
def _sorted(weights: jax.Array, rows: _Rows) -> jax.Array:
    """Returns the weights (n, K) of rows, (K · n,)."""
    return weights.T.reshape(-1)[rows.order]


# Spread and combine are each other's transposes. All gradients are gathers: no scatter
# adds up rows.
_spread.defvjp(
    lambda x, rows: (_spread(x, rows), rows),
    lambda rows, dy: (_combine(dy, rows), None),
)
_combine.defvjp(
    lambda y, rows: (_combine(y, rows), rows),
    lambda rows, dx: (_spread(dx, rows), None),
)
_sorted.defvjp(
    lambda weights, rows: (_sorted(weights, rows), rows),
    lambda rows, dy: (dy[rows.ranks].T, None),
)


def _biases(shares: jax.Array, bias: jax.Array) -> jax.Array:
    """Sums the experts' biases (X, F) by the shares (m, X) of each row: (m, F).

    A product, as the gradient of a look-up would be a scatter. It has a batch axis, of
    one, or the policies that keep products would keep it, as large as all rows.
    """
    dims = ((2,), (1,)), ((0,), (0,))
    return lax.dot_general(shares[None], bias[None], dims, precision="highest")[0]


class Experts(nnx.Module):
    """Gated feed-forwards, of which each token takes a few, and maybe a shared one.

    A chunk of the local tokens at a time; the router sees all of them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        partition: Partition,
        chunk: int,
        *,
        rngs: nnx.Rngs,
    ):
        """Makes the parameters.

        Raises:
          ValueError: on GPUs without tokamax.
        """
        check_platform(partition.platform)
        self.config = config
        self.partition = partition
        self.chunk = chunk
        sides = config.matrix_sides()
        stddevs = dict.fromkeys(FORMS, INITIAL_STDDEV)
        for name in ("down", "shared_down"):
            stddevs[name] *= (2 * config.num_layers) ** -0.5
        for name in ("router", *ROUTED, *SHARED, "shared_weight"):
            if name in sides:
                experts = (config.experts,) if name in ROUTED else ()
                shape = (*experts, *sides[name])
                param = matrix(rngs, shape, self._axes(name), stddevs[name])
                setattr(self, name, param)
        if config.expert_bias or config.router == "sigmoid":
            self.router_bias = zeros((config.experts,), FORMS["router_bias"])
        for name in ROUTED if config.expert_bias else ():
            bias = f"{name}_bias"
            shape = (config.experts, sides[name][1])
            setattr(self, bias, zeros(shape, FORMS[bias]))
        for name in ROUTED:  # in one order on all hosts, which draw the same numbers
            if name in config.lora.matrices:
                self._adapt(name, rngs)

    def _axes(self, name: str) -> Axes:
        """Returns the names of a matrix's axes, for these experts and devices."""
        if name in SIDES and not self.partition.divides("experts", self.config.experts):
            return SIDES[name]
        return FORMS[name]

    def _adapt(self, name: str, rngs: nnx.Rngs) -> None:
        """Gives each expert's matrix two factors of its own; see `adapters.adapt`."""
        experts, inputs, outputs = getattr(self, name).shape
        lora = self.config.lora
        rank = lora.rank_of(name)
        bound = inputs**-0.5
        shape = (experts, inputs, rank)
        a = jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
        b = jnp.zeros((experts, rank, outputs), jnp.float32)
        factors = {f"{name}_a": a, f"{name}_b": b}
        if name == "up" and lora.gate_up_rank:
            del factors["up_a"]  # gate's is its own
        for factor, values in factors.items():
            setattr(self, factor, nnx.LoRAParam(values, axes=FORMS[factor]))

    def __call__(
        self, x: jax.Array, norm: RMSNorm | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what the experts add to x (B, T, E), as x, and how they are loaded.

        norm: of the result. The loads, float32 (2,): the balance loss, X times the sum
        over experts of the tokens that took one and its mean probability, both as
        shares, which is K for equal shares (2101.03961, as transformers has it); and
        the tokens of the busiest expert over the mean.
        """
        weights = {name: p for name, p in vars(self).items() if name in FORMS}

        def local(x: jax.Array, *shards: jax.Array) -> tuple[jax.Array, jax.Array]:
            named = dict(zip(weights, shards, strict=True))
            # One product gives both: rows are read once, and so is their gradient made.
            gate_up = named.pop("gate"), named.pop("up")
            named["gate_up"] = jnp.concatenate(gate_up, -1)
            whole = {}
            for name, shard in named.items():
                whole[name] = self._whole(name, shard, x.dtype)
            return self._of_shard(x, whole)

        names = [self._axes(name) for name in weights]
        call = self.partition.over_shards(
            local, (RESIDUAL, *names), RESIDUAL, beside=(None, None)
        )
        y, loads = call(x, *(parameter[...] for parameter in weights.values()))
        shares = loads / (x.shape[0] * x.shape[1])  # (2, X), of all tokens
        experts = self.config.experts
        balance = experts * (shares[0] * shares[1]).sum()
        busiest = shares[0].max() * experts / self.config.experts_per_token
        y = y if norm is None else norm(y)
        return y, jnp.stack([balance, busiest])

    def _whole(self, name: str, shard: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Gathers a weight, which travels in `dtype`, but the router in float32."""
        name = "gate" if name == "gate_up" else name
        axes = self._axes(name)
        if axes[0] == "experts":
            # As rows of one matrix, which are scattered as those of others are.
            rows = shard.reshape(-1, shard.shape[-1])
            count = self.config.experts * shard.shape[1]
            whole = self.partition.gather(rows, 0, count, dtype)
            return whole.reshape(-1, *shard.shape[1:])
        if "embed" not in axes:
            return shard
        axis = axes.index("embed")
        size = getattr(self, name).shape[axis]
        dtype = jnp.dtype("float32") if name == "router" else dtype
        return self.partition.gather(shard, axis, size, dtype)

    def _of_shard(self, x: jax.Array, whole: Whole) -> tuple[jax.Array, jax.Array]:
        """Returns the experts' sum for a device's tokens x (b, t, E), and all loads.

        whole: matrices, of which a device has some columns of gate and up, and the rows
          of down that belong to these.
        """
        partition = self.partition
        tokens = x.reshape(-1, x.shape[-1])  # (n, E)
        logits = jnp.dot(
            tokens.astype(jnp.float32), whole["router"], precision="highest"
        )  # (n, X)
        bias = whole.get("router_bias")
        if self.config.router != "sigmoid" and bias is not None:
            logits += bias
            bias = None
        routing = route(logits, bias, self.config.router, self.config.experts_per_token)
        weights = routing.weights
        if self.config.expert_scale != 1:
            weights *= self.config.expert_scale
        operands = tokens, weights, routing.chosen
        run_chunk = functools.partial(self._of_chunk, whole=whole)
        y = scan_chunks(run_chunk, operands, self.chunk or len(tokens))
        # All devices that share the experts' width have routed the same tokens.
        loads = routing.loads / partition.shards("mlp")
        loads = partition.total(loads, ("batch", "sequence", "mlp"))
        return partition.total(y.reshape(x.shape), ("mlp",)), loads

    def _of_chunk(
        self, chunk: tuple[jax.Array, jax.Array, jax.Array], whole: Whole
    ) -> jax.Array:
        """Returns the experts' sum (n, E) for x (n, E), weights and chosen (n, K)."""
        x, weights, chosen = chunk
        experts = self.config.experts
        rows = _Rows.of(chosen, experts)
        gate, up = self._gate_and_up(_spread(x, rows), whole, rows)
        hidden = glu(self.config.activation, gate, up)  # float32 (K · n, F)
        # Weighted here: so the gradient of the weights needs no result of down.
        hidden *= _sorted(weights, rows)[:, None]
        hidden = hidden.astype(x.dtype)
        down = self._multiply(hidden, whole["down"], rows)
        y = _combine(self._adapted(down, hidden, whole, "down", rows), rows)
        if "down_bias" in whole:
            shares = jax.nn.one_hot(chosen, experts) * weights[..., None]  # (n, K, X)
            added = _biases(shares.sum(1), whole["down_bias"])  # (n, E)
            # Of one of the devices whose parts are summed.
            is_first = self.partition.shard_number("mlp") == 0
            y += jnp.where(is_first, added, 0).astype(x.dtype)
        if "shared_up" in whole:
            y += self._shared(x, whole)
        return y

    def _gate_and_up(
        self, x: jax.Array, whole: Whole, rows: _Rows
    ) -> tuple[jax.Array, jax.Array]:
        """Returns gate and up (K · n, F) of sorted rows x (K · n, E)."""
        both = self._multiply(x, whole["gate_up"], rows)
        parts = []
        for name, part in zip(("gate", "up"), jnp.split(both, 2, -1), strict=True):
            part = self._adapted(part, x, whole, name, rows)
            if f"{name}_bias" in whole:
                bias = whole[f"{name}_bias"].astype(x.dtype)
                is_expert = jax.nn.one_hot(rows.expert, len(bias), dtype=x.dtype)
                part += _biases(is_expert, bias)
            parts.append(part)
        gate, up = parts
        return gate, up

    def _adapted(
        self, y: jax.Array, x: jax.Array, whole: Whole, name: str, rows: _Rows
    ) -> jax.Array:
        """Adds to y what the adapters of a matrix, if it has any, make of rows x."""
        if f"{name}_b" not in whole:
            return y
        a = f"{name}_a" if f"{name}_a" in whole else "gate_a"
        z = self.config.lora.scale * self._multiply(x, whole[a], rows)
        return y + self._multiply(z, whole[f"{name}_b"], rows)

    def _multiply(self, x: jax.Array, weight: jax.Array, rows: _Rows) -> jax.Array:
        partition = self.partition
        return grouped_product(
            x, weight, rows.sizes, partition.platform, partition.kernel_units
        )

    def _shared(self, x: jax.Array, whole: Whole) -> jax.Array:
        """Returns what the expert adds that all tokens x (n, E) take."""
        gate = jnp.dot(x, whole["shared_gate"].astype(x.dtype))
        up = jnp.dot(x, whole["shared_up"].astype(x.dtype))
        hidden = glu(self.config.activation, gate, up)
        if "shared_weight" in whole:
            weight = jnp.dot(
                x,
                whole["shared_weight"].astype(x.dtype),
                preferred_element_type=jnp.float32,
            )  # (n, 1)
            hidden *= jax.nn.sigmoid(weight)
        return jnp.dot(hidden.astype(x.dtype), whole["shared_down"].astype(x.dtype))
