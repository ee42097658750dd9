"""This library's kernels under the code of papers' authors, which stays as it is: a patch for each, applied to their module or model.

Their code is found in a checkout of yours; nothing of it is here. docs/guides/backends.md shows how, and what it gains.
"""
