"""The mask of a config's run."""

import ml_collections

from data.document_mask import DocumentMask
from models.sizes import WINDOW
from tasks.config_errors import names_fields


@names_fields
def document_mask(config: ml_collections.ConfigDict) -> DocumentMask:
    """Returns which tokens of its document a token sees, in layers without windows.

    Raises:
      ValueError: the mask is unknown, or it does not go with other fields.
    """
    mask = DocumentMask.parse(config.mask)
    if config.task == "exorl" and mask != DocumentMask():
        raise ValueError(
            f"{config.mask=} is not for agents, which see their whole chain: set it to "
            '"causal"'
        )
    if not mask.prefix:
        return mask
    if config.remat == "tail":
        raise ValueError(
            f"{config.mask=} shows tokens ahead, and {config.remat=} needs a causal "
            "mask: set config.remat=attention"
        )
    if mask.prefix >= config.data.context_tokens:
        raise ValueError(
            f"{config.mask=} leaves no token with a loss: its prefix must be below "
            f"{config.data.context_tokens=}"
        )
    if set(config.model.layer_pattern) == {WINDOW}:
        raise ValueError(
            f"{config.mask=} would show nothing ahead, as every layer has a window "
            f'({config.model.layer_pattern=}): set it to "causal"'
        )
    return mask
