"""The language model in the config.json of a model for images or sound.

Source: `get_text_config` and the `from_pretrained` of transformers' classes for such models.
"""

from __future__ import annotations

from pdkernels.models.files.fields import Fields

_INNER = "text_config"
_OUTER = ("tie_word_embeddings",)
"""Fields that count only in the outer config, with its defaults: the whole model is made and saved by them."""


def language_fields(fields: Fields) -> Fields:
    """The fields of the language model; of a model for text alone, all.

    >>> outer = Fields({"tie_word_embeddings": False, "text_config": {"vocab_size": 5, "tie_word_embeddings": True}})
    >>> language_fields(outer).given
    {'vocab_size': 5, 'tie_word_embeddings': False}
    >>> language_fields(Fields({"text_config": {"tie_word_embeddings": True}})).given
    {}
    """
    if _INNER not in fields.values:
        return fields
    inner = fields.part(_INNER)
    rest = {name: value for name, value in inner.given.items() if name not in _OUTER}
    return Fields({**rest, **{name: fields.given[name] for name in _OUTER if name in fields.given}}, inner.where)
