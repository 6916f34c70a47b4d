#!/bin/sh
# Every target figure of the server on one H200, in two and a half minutes:
#   sh bench/serve_h200.sh OUT_FOLDER      parts: OUT_FOLDER/*.json and *.log; the last lines compare them with the targets
# MODEL=DIR uses that model instead of a random one of 1.245B parameters; SYNC=135m the smaller weights, SYNC=off none;
# RATE, SECONDS_EACH.
out=${1:-bench/results}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
scratch=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null
  rm -rf "$scratch"
}
trap finish EXIT
say() { echo "[$(($(date +%s) - began)) s] $*"; }
began=$(date +%s)
model=${MODEL:-$scratch/model}
[ -n "${MODEL:-}" ] || timeout 40 "$python" -c "import sys, pathlib; from bench.decode.speed import random_model; \
random_model('1.2b', pathlib.Path(sys.argv[1]))" "$scratch"
say "model"

timeout 45 "$python" -m lakh bench decode "$model" --batch 1,64 --prompt "${PROMPT:-512}" --new 128 --repeats 2 \
  --systems lakh --json 2>"$out/decode.log" | tail -1 | tee "$out/decode.json"
say "decode"

# The server loads and captures its graphs; nothing else uses the GPU.
"$python" -m lakh serve "$model" --http 127.0.0.1:8123 --max-waiting 256 ${SERVE_OPTIONS:-} >"$out/serve.log" 2>&1 &
server=$!
for _ in $(seq 240); do
  grep -q "^try" "$out/serve.log" && break
  kill -0 "$server" 2>/dev/null || break
  sleep 0.25
done
say "serving"
timeout 20 "$python" -m bench.serve.ttft http://127.0.0.1:8123 40 --json | tee "$out/ttft.json"
load() {
  timeout 90 "$python" -m lakh loadgen http://127.0.0.1:8123 --rate "$1" --seconds "$2" --users 60 --max-tokens 32 \
    --prefix-chars 1600 --suffix-chars 450 --timeout-ms 1000 --order spm --seed 7 --json 2>&1 | tail -1
}
load 30 4 >/dev/null # warm-up: the same users (seed) are active when the measured load starts
# Long enough that the first prompts of new users, 12 ms each, are not the 99th percentile.
load "${RATE:-100}" "${SECONDS_EACH:-30}" | tee "$out/loadgen.json"
"$python" -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/metrics', timeout=5).read().decode())" \
  | grep -v '^#' >"$out/metrics.txt"
kill $server
wait $server 2>/dev/null
server=
say "load"

if [ "${SYNC:-1.2b}" != off ]; then
  timeout 40 "$python" -m bench.serve.weight_sync --shape "${SYNC:-1.2b}" --backend gloo --repeats 2 | tee "$out/sync.json"
  say "weight sync"
fi
"$python" -m bench.serve.bars "$out"
