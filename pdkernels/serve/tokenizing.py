"""Texts and chats as tokens, and back, by the names of vLLM.

Source: docs.vllm.ai, "OpenAI-Compatible Server", "Tokenizer API".
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import Field, StrictInt

from pdkernels.serve.errors import Refused
from pdkernels.serve.frontend import Frontend
from pdkernels.serve.gate import Escaped
from pdkernels.serve.log_probs import shown, written
from pdkernels.serve.schema import LONGEST, TO_FIRST, ChatRequest, Flag, InUnicode, ObjectList, Strict, Tool
from pdkernels.serve.threads import in_thread


class TokenizeRequest(Strict):
    """The body of `/tokenize`: a text or a chat."""

    model: str | None = None
    prompt: Annotated[str | None, InUnicode] = None
    messages: Annotated[ObjectList, Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    """Whether those are added that the tokenizer puts around a text; a chat's template writes them itself."""
    return_token_strs: Flag = False
    """Whether each token's text comes, too."""
    add_generation_prompt: Flag | None = None
    """Whether a chat ends with the beginning of an answer; null: unless its last message is continued."""
    continue_final_message: Flag = False
    """Whether a chat ends within its last message."""
    tools: Annotated[list[Tool], TO_FIRST, LONGEST] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_OF_CHATS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeResponse(Strict):
    """Tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0)]], TO_FIRST]


class DetokenizeResponse(Strict):
    """The text of tokens, special ones included."""

    prompt: str


def add_tokenizer(app: FastAPI, front: Frontend) -> None:
    """Adds the routes of the tokenizer to an application."""

    def tokenizer_for(model: str | None) -> Any:
        if model is not None:
            front.check_model(model)
        if (tokenizer := front.engine.model.tokenizer) is None:
            raise Refused("this model has no tokenizer", 400, "model")
        return tokenizer

    def encoded(body: TokenizeRequest) -> list[int]:
        tokenizer = tokenizer_for(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused("either prompt or messages must be given", 400, "prompt")
        if body.prompt is not None:
            for name in _OF_CHATS:
                if getattr(body, name):
                    raise Refused(f"{name} is of a chat: messages must be given in place of prompt", 400, name)
            bare = (
                {}
                if body.add_special_tokens in (None, True) or not adds_tokens(tokenizer)
                else {"add_special_tokens": False}
            )
            ids: list[int] = tokenizer.encode(body.prompt, **bare)
            return ids
        if body.add_special_tokens:
            raise Refused("add_special_tokens: the chat template writes them itself", 400, "add_special_tokens")
        ending = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message or None,
        }
        variables = {
            **(body.chat_template_kwargs or {}),
            **{name: flag for name, flag in ending.items() if flag is not None},
        }
        chat = ChatRequest(
            model=front.name, messages=body.messages or [], tools=body.tools, chat_template_kwargs=variables
        )
        return front.chat_tokens(chat)

    def tokenized(body: TokenizeRequest) -> Escaped:
        ids = encoded(body)
        longest = front.engine.max_prompt_tokens + front.engine.max_new_tokens
        texts = token_texts(front.engine.model.tokenizer, ids) if body.return_token_strs else None
        content = {"count": len(ids), "max_model_len": longest, "tokens": ids}
        return Escaped(content if texts is None else {**content, "token_strs": texts})

    def detokenized(body: DetokenizeRequest) -> Escaped:
        tokenizer = tokenizer_for(body.model)
        most = getattr(tokenizer, "vocab_size", front.engine.model.config.vocab_size)
        if max(body.tokens, default=0) >= most:
            raise Refused(f"tokens must be below {most}", 400, "tokens")
        return Escaped({"prompt": getattr(tokenizer, "decode_all", tokenizer.decode)(body.tokens)})

    # Responses, since FastAPI would check and write a long list on the event loop.
    @app.post("/tokenize", response_model=TokenizeResponse)
    @app.post("/v1/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        return await in_thread(tokenized, body)

    @app.post("/detokenize", response_model=DetokenizeResponse)
    @app.post("/v1/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        return await in_thread(detokenized, body)


def adds_tokens(tokenizer: Any) -> bool:
    """Whether a tokenizer can leave out the tokens that it puts around a text."""
    return hasattr(tokenizer, "decode_all")


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token writes, and the names of special ones."""
    bytes_of, decode_all = written(tokenizer), getattr(tokenizer, "decode_all", None)
    return [shown(bytes_of(token)) or (decode_all([token]) if decode_all else "") for token in ids]
