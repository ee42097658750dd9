#!/bin/bash
# A quarter of an hour on a GPU: builds, and then asks what tells most (docs/gpu_proof.md):  OUT=folder scripts/gpu_window.sh [--dry-run]
cd "$(dirname "$0")/.." || exit
export PDKERNELS_CUDA_ARCHS=${PDKERNELS_CUDA_ARCHS:-90a}  # one, or the build takes three times as long
proof=("${PYTHON:-python3}" scripts/gpu_proof.py)
OUT=build/gpu_window "${proof[@]}" --part 0 "$@" && exec "${proof[@]}" --part 7 "$@"
