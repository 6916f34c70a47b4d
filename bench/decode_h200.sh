#!/bin/sh
# Decoding on one GPU beside transformers, same weights and prompts. The server's own bars: bench/serve_h200.sh; kernels
# by themselves: python -m bench.decode.gpu.
#   sh bench/decode_h200.sh OUT_FOLDER
out=${1:-bench/results}
export PYTHONPATH="$PWD/src:$PWD" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -c "import sys, pathlib; from bench.decode.speed import random_model; random_model('1.2b', pathlib.Path(sys.argv[1]))" "$scratch"
timeout 120 "$python" -m lakh bench decode "$scratch/model" --batch 1 --prompt 512 --new 128 --repeats 2 \
  --systems lakh,transformers-static,transformers --out "$out" --json 2>&1 | tail -3 | tee "$out/decode.json"
