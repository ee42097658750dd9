"""What `/replay` answers with: a page about a generation, and before it, in a stream, what is written so far."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from pdkernels.serve.choices import Choice
from pdkernels.serve.errors import Refused, error_body
from pdkernels.serve.gate import told
from pdkernels.serve.threads import in_thread


def replay_page(handle: Any) -> str:
    """The page of a generation that has ended."""
    try:
        result = handle.result()
    except CancelledError:
        raise Refused("the generation ended before it began: there was no time left for it", 503) from None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "replay.html"
        result.save_html(page)
        return page.read_text()


async def filling(handle: Any, tokenizer: Any) -> AsyncGenerator[str, None]:
    """Lines of JSON: `text`, which is final, and `after`, which may change, null where nothing is written; at last the
    `page`, or an `error`."""
    text, choice = "", Choice(handle, tokenizer, ())
    try:
        async for new in choice.news():
            after = new if isinstance(new, list) else []
            text += new if isinstance(new, str) else ""
            yield json.dumps({"text": text, "after": after}) + "\n"
        page = await in_thread(replay_page, handle)
        yield json.dumps({"page": page}) + "\n"
    except Exception as error:
        yield json.dumps(error_body(*told(error))) + "\n"
