"""Gemma 3 with images: the fields and tensors of its text model."""

from collections.abc import Mapping
from typing import Any

from data.json_text import short
from tools.lib.hf.fields import MADE_FROM

MODEL_TYPE = "gemma3"
_TEXT = "text_config"
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image", "image_token_index"),
    *("boi_token_index", "eoi_token_index"),
)
_LEFT_OUT = ("vision_tower.", "multi_modal_projector.")


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config.json as that of the text model alone; others as they are.

    Raises:
      ValueError: there is no text model, or two fields of it contradict each other.
    """
    if fields.get("model_type") != MODEL_TYPE:
        return fields
    text = fields.get(_TEXT)
    if not isinstance(text, Mapping):
        raise ValueError(
            f"config.json of model_type={MODEL_TYPE!r} must have an object {_TEXT}, "
            f"got {short(text)}: copy it again"
        )
    own = (_TEXT, "model_type", "architectures", *_OF_IMAGES)
    outer = {name: value for name, value in fields.items() if name not in own}
    for name in outer.keys() & text.keys() & MADE_FROM.keys():
        if outer[name] != text[name]:
            raise ValueError(
                f"config.json has {name} twice, as {short(outer[name])} and "
                f"{short(text[name])}"
            )
    return {"model_type": "gemma3_text", **text, **outer}


def text_name(name: str) -> str | None:
    """Returns a tensor's name in the text model alone; None if it is not of it.

    transformers 4.52 began to write "model." in front, and 5 ended it.
    """
    plain = name.removeprefix("model.")
    if plain.startswith(_LEFT_OUT):
        return None
    if name.startswith("model.language_model."):
        return "model." + plain.removeprefix("language_model.")
    return name.removeprefix("language_model.")
