"""Text: tokenizers, chat templates and what surrounds them."""
