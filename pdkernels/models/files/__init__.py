"""Files that nobody vouches for: folders, fields, GGUF, patterns."""
