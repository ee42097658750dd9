"""Adapts a tokenizer of transformers to the interface of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from pdkernels._validation import check_type, refuse, sentence
from pdkernels.models.text.chat import ChatTemplate, Messages, check_messages
from pdkernels.models.text.token_bytes import skips_first_space, token_bytes
from pdkernels.models.text.tokenizers import IncrementalDecoder, JsonTokenizer

OP = "transformers tokenizer"


class TheirTokenizer:
    """Encodes, renders chats and decodes as `tokenizer` does, which may also be a processor. Other attributes are its
    own."""

    def __init__(self, tokenizer: Any) -> None:
        self.given, self.tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "tokenizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        end = self.tokenizer.eos_token_id
        return () if end is None else (end,)

    @property
    def bos_token(self) -> int | None:
        begin: int | None = self.tokenizer.bos_token_id
        return begin

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """As that of `JsonTokenizer`, with the special tokens that its texts may name."""
        source = getattr(self.given, "chat_template", None)
        return None if source is None else ChatTemplate(source, self.tokenizer.special_tokens_map)

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """The ids of a chat up to the start of the model's answer. The template writes all special tokens."""
        check_messages(OP, "messages", messages)
        template = self.chat_template
        refuse(template is None, OP, "messages need a tokenizer with a chat template", "Write the prompt as text.")
        assert template is not None
        return self.encode(template.render(messages, **variables), add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def decode_all(self, ids: Iterable[int]) -> str:
        """The text including special tokens, in which stop strings are searched."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    @property
    def skips_first_space(self) -> bool:
        """As `JsonTokenizer.skips_first_space`."""
        return skips_first_space(self._fast())

    def token_bytes(self) -> list[bytes]:
        """As `JsonTokenizer.token_bytes`."""
        return token_bytes(self._fast(), type(self.tokenizer).__name__)

    def _fast(self) -> Any:
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            words = f"a grammar needs a fast tokenizer, and {type(self.tokenizer).__name__} is none"
            raise NotImplementedError(sentence(OP, words))
        return fast

    def incremental(self) -> IncrementalDecoder:
        return JsonTokenizer.incremental(cast(JsonTokenizer, self))


def adapted(tokenizer: Any) -> Any:
    """Adapts a tokenizer of transformers; returns any other one unchanged. TypeError: it is none."""
    if hasattr(tokenizer, "apply_chat_template") and not isinstance(tokenizer, TheirTokenizer):
        return TheirTokenizer(tokenizer)
    usable = all(hasattr(tokenizer, name) for name in ("encode", "decode"))
    expectation = "have encode(text) and decode(ids)"
    check_type(tokenizer is None or usable, OP, "tokenizer", expectation, type(tokenizer).__name__)
    return tokenizer
