"""What `/replay` answers with: a page about a generation, and before it, in a stream, what is written so far."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdkernels.serve.choices import Choice
from pdkernels.serve.errors import error_body, of_failure
from pdkernels.serve.threads import in_thread


def replay_page(result: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "replay.html"
        result.save_html(page)
        return page.read_text()


async def filling(handle: Any, tokenizer: Any) -> AsyncIterator[str]:
    """Lines of JSON: `text`, which is final, and `after`, which may change, null where nothing is written; at last the
    `page`, or an `error`. Whoever stops reading cancels the generation."""
    text, choice = "", Choice(handle, tokenizer, ())
    try:
        async for new in choice.news():
            after = new if isinstance(new, list) else []
            text += new if isinstance(new, str) else ""
            yield json.dumps({"text": text, "after": after}) + "\n"
        page = await in_thread(lambda: replay_page(handle.result()))
        yield json.dumps({"page": page}) + "\n"
    except Exception as error:
        yield json.dumps(error_body(*of_failure(error))) + "\n"
    finally:
        handle.cancel()
