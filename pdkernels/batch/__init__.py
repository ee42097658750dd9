"""Files of prompts: read, generated in batches, resumed."""
