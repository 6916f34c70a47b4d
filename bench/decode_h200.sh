#!/bin/sh
# The engine's GPU figures in one call: beside transformers, at batch 64, and under typing load. Kernels: bench/decode_gpu.py.
#   sh bench/decode_h200.sh OUT_FOLDER
out=${1:-bench/results}
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
scratch=$(mktemp -d)
"$python" -c "import sys, pathlib; from lakh.server.bench.decode import random_model; random_model('1.2b', pathlib.Path(sys.argv[1]))" "$scratch"
timeout 60 "$python" -m lakh bench decode "$scratch/model" --batch 1,64 --prompt 512 --new 128 --repeats 3 \
  --systems lakh --json 2>&1 | tail -3 | tee "$out/decode_lakh.json"
"$python" -m lakh serve "$scratch/model" --http 127.0.0.1:8000 >"$out/serve.log" 2>&1 &
server=$!
for _ in $(seq 90); do
  curl -sf http://127.0.0.1:8000/ready >/dev/null && break
  sleep 1
done
for rate in 10 100; do
  timeout 60 "$python" -m lakh loadgen http://127.0.0.1:8000 --rate $rate --seconds 12 --users 60 --max-tokens 32 \
    --prefix-chars 2200 --timeout-ms 1000 --order spm --json 2>&1 | tail -1 | tee "$out/loadgen_$rate.json"
done
kill $server
timeout 120 "$python" -m lakh bench decode "$scratch/model" --batch 1 --prompt 512 --new 128 --repeats 2 \
  --systems lakh,transformers-static,transformers --out "$out" --json 2>&1 | tail -3 | tee "$out/decode.json"
