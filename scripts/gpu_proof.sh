#!/bin/bash
# The proof that needs a GPU, in parts of under 10 minutes:  scripts/gpu_proof.sh --part 1 [2 ...] [--dry-run]   (docs/gpu_proof.md)
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" scripts/gpu_proof.py "$@"
