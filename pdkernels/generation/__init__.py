"""What a caller may ask of a generation, and how a token is chosen. Imports models and grammars, never decoding
methods."""

__all__: list[str] = []
