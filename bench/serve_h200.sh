#!/bin/sh
# Serving on one GPU under typing load: steps by themselves, then `lakh serve` with a random model of 1.245B parameters.
#   sh bench/serve_h200.sh OUT_FOLDER [RATE...]        (MODEL=DIR: that model; STEPS=0: no steps by themselves)
out=${1:-bench/results}
[ $# -gt 0 ] && shift
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
scratch=$(mktemp -d)
shape=${SHAPE:-1.2b}
[ -n "${MODEL:-}" ] || [ "${STEPS:-1}" = 0 ] || timeout 90 "$python" bench/decode_gpu.py --steps 2>&1 | tail -40
model=${MODEL:-$scratch/model}
[ -n "${MODEL:-}" ] || timeout 60 "$python" -c "import sys, pathlib; from lakh.server.bench.decode import random_model; \
random_model(sys.argv[2], pathlib.Path(sys.argv[1]))" "$scratch" "$shape"
"$python" -m lakh serve "$model" --http 127.0.0.1:8123 ${SERVE_OPTIONS:-} >"$out/serve.log" 2>&1 &
server=$!
for _ in $(seq 180); do
  grep -q "^try" "$out/serve.log" && break
  sleep 0.5
done
"$python" bench/serve_ttft.py http://127.0.0.1:8123 40
for rate in ${*:-20 100}; do
  echo "rate $rate"
  timeout 40 "$python" -m lakh loadgen http://127.0.0.1:8123 --rate "$rate" --seconds "${SECONDS_EACH:-12}" --users 60 \
    --max-tokens 32 --prefix-chars 1600 --suffix-chars 450 --timeout-ms 1000 --order spm --json 2>&1 | tail -1
done
"$python" -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/metrics', timeout=5).read().decode())" \
  | grep -v '^#' | grep -v _bucket
kill $server
wait $server 2>/dev/null
tail -5 "$out/serve.log"
rm -rf "$scratch"
