"""Rematerialisation policies, which say what the backward keeps of a layer."""

from collections.abc import Callable

import jax

_POLICIES = jax.checkpoint_policies

# Of the last half of each device's tokens, if the ring has `keep_tail`; then the others
# are those of the first half.
_TAIL = "attention_out", "attention_lse"
_RESULT = *_TAIL, "attention_front_out", "attention_front_lse"

REMAT_POLICIES: dict[str, Callable | None] = {
    # Everything: the fastest, where memory suffices.
    "everything": None,
    # The layer's input only, as in the papers; the ring runs twice. So do, in a layer's
    # backward, the projections to queries, keys and values (see `remat_attention`).
    "nothing": _POLICIES.nothing_saveable,
    # Also the attention's result: the ring runs once.
    "attention": _POLICIES.save_only_these_names(*_RESULT),
    # Half of the attention's result: of the last tokens, which take three quarters of a
    # causal ring; the ring of the first half runs again (BurstEngine, 2509.19836).
    "tail": _POLICIES.save_only_these_names(*_TAIL),
    # Also products with parameters, but for those of a feed-forward in chunks.
    "products": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable,
        _POLICIES.save_only_these_names(*_RESULT),
    ),
    # As nothing, but the layer's input is in the host's memory.
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies of `jax.checkpoint`; None for no rematerialisation."""

NEXT = {"nothing": "attention", "tail": "attention", "attention": "products"}
"""Policies that keep more: a budget of memory climbs them."""

RERUN = "nothing", "offload", "tail"
"""Policies with which a layer's backward runs its ring again, or half of it."""


def check_policy(policy: str) -> None:
    """Raises ValueError if the policy is unknown."""
    if policy not in REMAT_POLICIES:
        raise ValueError(f"remat {policy=} must be one of {', '.join(REMAT_POLICIES)}")


def remat(layer: Callable, policy: str) -> Callable:
    """Wraps `layer` to be recomputed in the backward, except what the policy keeps.

    Raises:
      ValueError: the policy is unknown.
    """
    check_policy(policy)
    if REMAT_POLICIES[policy] is None:
        return layer
    # Inside a scan the loop itself keeps XLA from undoing it (prevent_cse).
    return jax.checkpoint(layer, policy=REMAT_POLICIES[policy], prevent_cse=False)


def remat_attention(attention: Callable, policy: str) -> Callable:
    """Wraps attention to keep its result only while its layer is recomputed.

    Under the policies that run the ring again: so queries, keys and values are not
    there during the backward of the feed-forward, which comes first, and only those of
    one head group at a time are.
    """
    if policy not in RERUN:
        return attention
    keep = _POLICIES.save_only_these_names(*_RESULT)
    return jax.checkpoint(attention, policy=keep)


def remat_projection(projection: Callable, policy: str) -> Callable:
    """Wraps the projections of an attention that `remat_attention` recomputes.

    They are recomputed before the attention's backward, and their input, normalised,
    once more after it, so that it need not be there meanwhile.
    """
    return jax.checkpoint(projection) if policy in RERUN else projection
