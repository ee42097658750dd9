"""Files of prompts: read, generated in batches, resumed."""

__all__: list[str] = []
