"""Answers of chats and completions, whole or as they come, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError
from typing import Any

from pdkernels.decoding import LogProbs
from pdkernels.serve import log_probs
from pdkernels.serve.calls import joined
from pdkernels.serve.choices import Choice, New
from pdkernels.serve.errors import error_body
from pdkernels.serve.gate import told
from pdkernels.serve.json_text import written_json
from pdkernels.serve.parser import Thought
from pdkernels.serve.tagged import CallDelta
from pdkernels.serve.threads import in_thread

_AHEAD = 2
"""News of a stream that wait for its client."""


class Answer:
    """The choices of a request, whole or as they come.

    Args:
        kind: "chat" or "text".
        name: of the model.
        choices: those of one prompt after those of another.
        prompts: how many there are.
        reasoning: whether thoughts that come apart come at all.
    """

    def __init__(self, kind: str, name: str, choices: list[Choice], prompts: int, reasoning: bool = True) -> None:
        self.chat, self._reasoning = kind == "chat", reasoning
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self.choices, self._prompts = choices, prompts

    def cancel(self) -> None:
        """Ends what still runs."""
        for choice in self.choices:
            choice.cancel()

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        read = await asyncio.gather(*map(whole_choice, self.choices))
        entries = []
        for index, (choice, (thought, text, calls)) in enumerate(zip(self.choices, read, strict=True)):
            logprobs = await in_thread(self._likely, choice)
            content: dict[str, Any] = {"text": text}
            if self.chat:
                content = {"message": {"role": "assistant", **self._thought(thought), **_message(text, calls)}}
            entries.append({"index": index, **content, "logprobs": logprobs, "finish_reason": choice.reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": entries, "usage": self.usage()}

    def _thought(self, text: str) -> dict[str, Any]:
        """By the name that most clients know, and by the newer one."""
        return {"reasoning_content": text, "reasoning": text} if text and self._reasoning else {}

    def _likely(self, choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of a choice, if they were asked for."""
        try:
            result = choice.handle.result()
        except CancelledError:  # its time was over before it began
            return None
        if result.logprobs is None:
            return None
        assert isinstance(result.logprobs, LogProbs)
        ids = result.tokens.tolist()
        return log_probs.entries(self.chat, choice.tokenizer, ids, choice.text, result.logprobs, choice.marks)

    async def events(self, with_usage: bool) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        none: dict[str, Any] = {"usage": None} if with_usage else {}
        # Of bounded length: what nobody reads waits in the generations, which keep the latest of what may still change.
        news: asyncio.Queue[tuple[int, New | None, BaseException | None]] = asyncio.Queue(_AHEAD)

        async def read(index: int, choice: Choice) -> None:
            error: BaseException | None = None
            try:
                async for item in choice.news():
                    await news.put((index, item, None))
            except Exception as failed:
                error = failed
            await news.put((index, None, error))

        def event(entries: list[dict[str, Any]], write: Callable[[Any], str] = json.dumps, **fields: Any) -> str:
            return f"data: {write({**self._head, 'object': kind, 'choices': entries, **fields})}\n\n"

        def entry(index: int, new: New | None) -> dict[str, Any]:
            content_fields: dict[str, Any] = {"provisional": new} if isinstance(new, list) else {}
            if isinstance(new, Thought):
                content_fields = self._thought(str(new))
            elif isinstance(new, str):
                content_fields = {"content" if self.chat else "text": new}
            elif isinstance(new, CallDelta):
                content_fields = {"tool_calls": [new.written()]}
            content = {"delta": content_fields} if self.chat else {"text": "", **content_fields}
            choice = self.choices[index]
            # Log-probabilities are known at the end.
            logprobs, reason = (self._likely(choice), choice.reason) if new is None else (None, None)
            return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

        def last(index: int) -> str:
            return event([entry(index, None)], written_json, **none)

        readers = [asyncio.create_task(read(*pair)) for pair in enumerate(self.choices)]
        try:
            if self.chat:
                for index in range(len(self.choices)):
                    first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield event([first], **none)
            unfinished = len(readers)
            while unfinished:
                index, new, error = await news.get()
                if error is not None:
                    yield f"data: {json.dumps(error_body(*told(error)))}\n\n"
                    return
                unfinished -= new is None
                # The last one has the log-probabilities of the whole answer.
                yield await in_thread(last, index) if new is None else event([entry(index, new)], **none)
            if with_usage:
                yield event([], usage=self.usage())
            yield "data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of the answers."""
        firsts = self.choices[:: len(self.choices) // self._prompts]
        prompt = sum(len(choice.prompt) for choice in firsts)
        new, accepted = (sum(counts) for counts in zip(*(choice.tokens for choice in self.choices), strict=True))
        details = {"accepted_prediction_tokens": accepted}
        if self.chat:
            details["reasoning_tokens"] = sum(choice.thought_tokens for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        cached = {"cached_tokens": sum(choice.cached for choice in firsts)}
        return {**counts, "prompt_tokens_details": cached, "completion_tokens_details": details}


async def whole_choice(choice: Choice) -> tuple[str, str, list[dict[str, Any]]]:
    """The thought of a choice, its text without thought and calls, and the calls."""
    news = [new async for new in choice.news()]
    thought = "".join(new for new in news if isinstance(new, Thought))
    text = "".join(new for new in news if isinstance(new, str) and not isinstance(new, Thought))
    return thought, text, joined([new for new in news if isinstance(new, CallDelta)])


def _message(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": text or None, "tool_calls": calls} if calls else {"content": text}
