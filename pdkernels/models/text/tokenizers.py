"""Text to ids and back: bytes for the tiny models, `tokenizer.json` for real checkpoints."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pdkernels._validation import check, check_text, fail, message, sentence
from pdkernels.models.text.chat import ChatTemplate, Messages
from pdkernels.models.text.token_bytes import skips_first_space, split_runs, token_bytes
from pdkernels.models.text.tokenizer_bounds import check_bounds
from pdkernels.models.text.tokenizer_files import TokenizerFiles


class IncrementalDecoder(Protocol):
    """Decodes a stream of ids: `feed` returns the text that can no longer change, `flush` the rest."""

    def feed(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """The interface of `Transformer.tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_tokens(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def incremental(self) -> IncrementalDecoder: ...


_FILE_BYTES = 1 << 28
_LONG = 1 << 12  # characters of a text that is encoded for milliseconds, or tokens that are decoded


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; id 256 ends a text.

    `decode` skips the end token and the `special` ids after it, such as those of plans, and puts U+FFFD where bytes are
    not UTF-8.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169, tokenizer.end_token])
    'né'
    >>> stream = tokenizer.incremental()
    >>> [stream.feed([byte]) for byte in (110, 195, 169)]
    ['n', '', 'é']
    """

    end_token = 256
    vocab_size = 257
    end_tokens = (256,)

    def __init__(self, special: int = 0) -> None:
        self._ids = self.vocab_size + special

    def encode(self, text: str) -> list[int]:
        check_text("ByteTokenizer.encode", text)
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.incremental()
        return stream.feed(ids) + stream.flush()

    def incremental(self) -> IncrementalDecoder:
        return _ByteStream(self._ids)

    def token_bytes(self) -> list[bytes]:
        """What each token writes; nothing for the end token."""
        return [bytes([byte]) for byte in range(256)] + [b""]


class _ByteStream:
    def __init__(self, ids: int) -> None:
        self._ids = ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        values = [int(i) for i in ids]
        for value in values:
            check(0 <= value < self._ids, "ByteTokenizer.decode", "ids", f"lie in [0, {self._ids})", value)
        return self._decoder.decode(bytes(value for value in values if value < ByteTokenizer.end_token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """The `tokenizer.json` of a checkpoint, through the optional library `tokenizers`. Special tokens are not decoded.

    `chat_template` (or None) turns a list of messages into text. `bos_token_id` and `eos_token_id` are the ids that the
    other files name, or None.
    """

    def __init__(
        self, path: Path | str, *, end_tokens: tuple[int, ...] = (), chat_template: ChatTemplate | None = None
    ) -> None:
        tokenizers = library(path, ", or move the file away to work with token ids")
        name = Path(path).name
        text = _checked(Path(path))
        with naming(name, "be what the library `tokenizers` reads"):
            read = tokenizers.Tokenizer.from_str(text)
        self._keep(read, name, end_tokens, chat_template)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        name: str,
        *,
        end_tokens: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
        bos_token_id: int | None = None,
    ) -> JsonTokenizer:
        """Wraps a tokenizer of the library; errors mention `name`."""
        instance = cls.__new__(cls)
        instance._keep(tokenizer, name, end_tokens, chat_template)
        instance.bos_token_id, instance.eos_token_id = bos_token_id, next(iter(end_tokens), None)
        return instance

    def _keep(self, tokenizer: Any, name: str, end_tokens: tuple[int, ...], chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        # Some files hold the truncation or padding of training; a prompt is left as it is.
        self.pad_token: str | None = (self._tokenizer.padding or {}).get("pad_token")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._name = name
        self.end_tokens = end_tokens
        self.chat_template = chat_template
        self.bos_token_id: int | None = None
        self._token_bytes: list[bytes] | None = None

    @property
    def byte_level(self) -> bool:
        """Whether text is split into bytes, as GPT-2 and Llama 3 do."""
        return any(
            "ByteLevel" in str(component) for component in (self._tokenizer.pre_tokenizer, self._tokenizer.decoder)
        )

    def follow_(self, files: TokenizerFiles) -> None:
        """Applies the files next to a tokenizer.json.

        Raises NotImplementedError for a clean-up of decoded text, which would change text that was streamed before.
        """
        self._token_bytes = None
        model = type(self._tokenizer.model).__name__
        if files.clean_up and model != "BPE":
            label = "tokenizer_config.json: clean_up_tokenization_spaces"
            raise NotImplementedError(message("models.load", label, f"be false for a tokenizer of kind {model}", True))
        added = library(self._name).AddedToken
        with naming(self._name, "take the tokens of tokenizer_config.json"):
            existing = self._tokenizer.get_added_tokens_decoder().values()
            by_content = {token.content: token for token in existing}
            special = set(files.tokens.values())
            for token in files.added:
                token_added = added(
                    token.content, special=token.special or token.content in special, **dict(token.options)
                )
                if token.content not in by_content or token.listed:
                    self._tokenizer.add_tokens([token_added])
            self._tokenizer.encode_special_tokens = files.split_special_tokens
        self.chat_template = files.chat_template
        named_ids = [files.tokens.get(name) for name in ("bos_token", "eos_token")]
        self.bos_token_id, self.eos_token_id = (None if token is None else self.id_of(token) for token in named_ids)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def described(self) -> dict[str, Any]:
        """What a tokenizer.json would hold of it."""
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found

    def id_of(self, token: str) -> int | None:
        """The id of an entry of the vocabulary; None if there is no such entry."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds at both ends, unless they are disabled."""
        check_text("JsonTokenizer.encode", text)
        with naming(self._name, "encode the text"):
            return self._ids(text, add_special_tokens)

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """The ids of a chat up to the start of the model's answer. `variables` are passed to the template.

        The template writes the special tokens itself: none is added before or after its text.
        """
        op = "JsonTokenizer.encode_chat"
        remedy = "Write the prompt as text."
        if self.chat_template is None:
            raise ValueError(sentence(op, f"messages need a chat template, and {self._name} has none", remedy))
        text = self.chat_template.render(messages, **variables)
        check_text(op, text)
        with naming(self._name, "encode the text"):
            return self._ids(text, False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of a long text by the call for several, during which other threads run."""
        if len(text) > _LONG:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self._decode([int(i) for i in ids], True)

    def decode_all(self, ids: Iterable[int]) -> str:
        """The text including special tokens, in which stop strings are searched."""
        return self._decode([int(i) for i in ids], False)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The library makes replacement characters of a whole run of byte tokens that is not UTF-8. As in sentencepiece,
        those that are no part of a character alone become one each."""
        with naming(self._name, "decode the ids"):
            if len(ids) > _LONG:  # by the call for several, during which other threads run
                text = str(self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
            else:
                text = str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
            if "\ufffd" not in text or "ByteFallback" not in str(self._tokenizer.decoder):
                return text
            added = self._tokenizer.get_added_tokens_decoder()
            skipped = {token for token, entry in added.items() if entry.special} if skip_special_tokens else set()
            names = (self._tokenizer.id_to_token(token) for token in ids if token not in skipped)
            return str(self._tokenizer.decoder.decode(split_runs([name for name in names if name is not None])))

    def incremental(self) -> IncrementalDecoder:
        return _JsonStream(self)

    @property
    def skips_first_space(self) -> bool:
        """Whether `decode` leaves out a space at the beginning of a text."""
        return skips_first_space(self._tokenizer)

    def token_bytes(self) -> list[bytes]:
        """What each token writes; nothing for special ones, which `decode` leaves out.

        Raises NotImplementedError for a tokenizer whose texts are not these bytes one after the other.
        """
        if self._token_bytes is None:
            self._token_bytes = token_bytes(self._tokenizer, self._name)
        return self._token_bytes


def _checked(path: Path) -> str:
    """The text of a tokenizer.json that stays within bounds."""
    op, name = "models.load", path.name
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
        check(len(content) <= _FILE_BYTES, op, name, f"have at most {_FILE_BYTES} bytes", "more")
        text = content.decode("utf-8")
        values = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name))
    except RecursionError:
        fail(op, name, "be JSON", "too many brackets inside each other")
    except (OSError, ValueError) as error:
        if str(error).startswith("pdkernels."):
            raise
        fail(op, name, "be JSON that can be read", " ".join(str(error).split())[:200])
    check_bounds(values, name)
    return text


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    """A JSON object without duplicate fields, of which the library might read the one that was not checked."""
    fields = dict(pairs)
    check(len(fields) == len(pairs), "models.load", name, "name each field once", "one twice")
    return fields


def library(path: Path | str, or_else: str = "") -> Any:
    """The library `tokenizers`, which `path` needs."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"pdkernels.models.load: {path} needs the optional library `tokenizers`. "
            f"Install it with `pip install tokenizers`{or_else}."
        ) from error
    return tokenizers


@contextmanager
def naming(name: str, expectation: str) -> Iterator[None]:
    """Makes errors of the library, mostly bare Exceptions, name the file. A panic inside it is not even an
    Exception."""
    try:
        yield
    except BaseException as error:
        foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not foreign or str(error).startswith("pdkernels."):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        fail("models.load", name, expectation, reason[:200] or type(error).__name__)


def incremental(tokenizer: Any) -> IncrementalDecoder:
    """Decodes a stream of ids as a tokenizer does it, or by its `decode` if it has nothing else."""
    decoder = getattr(tokenizer, "incremental", None)
    stream: IncrementalDecoder = _JsonStream(tokenizer) if decoder is None else decoder()
    return stream


class _JsonStream:
    """Decodes new ids together with the piece before them, because a token's text may depend on the previous token.

    A piece that ends inside a character waits for the rest of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        self._new.extend(int(i) for i in ids)
        text = self._text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._new = self._new, []
        return text

    def flush(self) -> str:
        text = self._text()
        self._context, self._new = [], []
        return text

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._context + self._new)
        return text[len(self._tokenizer.decode(self._context)) :]
