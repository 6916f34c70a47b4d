#!/bin/bash
# The Python pair from its list of packages to its scores, one stage a call. What came of it: docs/explanation/models/lakh-python.md
#
#   scripts/python_pair.sh corpus WORK        fetch and build (hours of one core, or 15 minutes of two good ones)
#   scripts/python_pair.sh pieces WORK        tokenizer, and the corpus as pieces of xz for a GPU machine
#   scripts/python_pair.sh tokens WORK        on the GPU machine: pieces to token sets
#   scripts/python_pair.sh draft WORK [...]   train and export the draft; [...] are settings: --set PATH=VALUE
#   scripts/python_pair.sh target WORK S [...]    train the target for about S seconds, and export it
#   scripts/python_pair.sh target2 WORK N     the target goes on for N steps with Debian's sources too, and is exported
#   scripts/python_pair.sh ablations WORK N   the draft for N steps in several ways at once: what each choice is worth
#   scripts/python_pair.sh generate WORK      answers to the benchmarks, bits per byte; no sandbox needed
#   scripts/python_pair.sh score WORK         where there is a sandbox: the answers' scores
#
# Stages go on where they stopped; WORK holds everything. Before `pieces` and `generate`: WORK/benchmarks with
# HumanEval.jsonl.gz, HumanEval-SingleLineInfilling.jsonl.gz, HumanEval-RandomSpanInfillingLight.jsonl.gz, mbpp.jsonl,
# sanitized-mbpp.json and cruxeval.jsonl. A machine that may be taken away: bring WORK/gguf back after each of draft and
# target; `keep WORK` writes the newest checkpoint of a running target there.
set -eu
stage=${1:?a stage: corpus, pieces, tokens, draft, target, target2, ablations, keep, generate, score}
work=$(mkdir -p "${2:?a folder to work in}" && cd "$2" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
lakh() { "$python" -m lakh "$@"; }
data=(--set "data.tokens=$work/tokens/heldout" --set "data.mixture=[{tokens=\"$work/tokens/train\"}]")
SUSTAINED=0.9 # of the speed of the first steps: a GPU that has been busy for minutes is held back by its power limit

export_model() { # NAME: Hugging Face folder and GGUF of a run's newest checkpoint
  lakh export "$work/runs/$1" --out "$work/hf/$1" --force
  lakh export "$work/runs/$1" --format gguf --out "$work/gguf/$1" --force
}

train() { # NAME RECIPE SETTINGS...: start, or go on
  local name=$1 recipe=$2
  shift 2
  if [ -d "$work/runs/$name/checkpoints" ]; then
    lakh resume "$work/runs/$name" --json | tee "$work/$name.json"
  else
    lakh train "recipes/python_pair.py:$recipe" --out "$work/runs/$name" "${data[@]}" "$@" --json | tee "$work/$name.json"
  fi
}

case $stage in
corpus)
  cd "$work" # the settings name the benchmarks by these paths, and the corpus stores its settings
  list='["benchmarks/HumanEval.jsonl.gz","benchmarks/HumanEval-SingleLineInfilling.jsonl.gz"'
  list+=',"benchmarks/HumanEval-RandomSpanInfillingLight.jsonl.gz","benchmarks/mbpp.jsonl"'
  list+=',"benchmarks/sanitized-mbpp.json","benchmarks/cruxeval.jsonl"]'
  build() {
    lakh corpus build "@$OLDPWD/recipes/$1" --out "$2" --max-bytes-per-repo 5000000 --set 'filters.languages=["python"]' \
      --set filters.max_file_bytes=300000 --set 'licences.take=["permissive"]' \
      --set "decontaminate.benchmarks=$list" "${@:3}" --json
  }
  build python_packages.txt corpus
  build debian_packages.txt corpus-debian --against corpus # and nothing that is like it, held out or not
  ;;
pieces)
  lakh tokens train "$work/corpus" --out "$work/tokenizer" --vocab 16384 --sample-bytes 48000000
  "$python" scripts/carry_corpus.py pack "$work/corpus" "$work/pieces" --heldout 0.015 --per-repo-mb 1 --piece-mb 64
  "$python" scripts/carry_corpus.py pack "$work/corpus-debian" "$work/pieces-debian" --heldout 0 --piece-mb 64
  ;;
tokens)
  for part in heldout train; do
    [ -e "$work/corpus-$part/manifest.json" ] ||
      "$python" scripts/carry_corpus.py unpack "$work/pieces" "$work/corpus-$part" --part $part
  done
  lakh tokens pack "$work/corpus-heldout" --tokenizer "$work/tokenizer" --out "$work/tokens/heldout" --heldout 0.9
  lakh tokens pack "$work/corpus-train" --tokenizer "$work/tokenizer" --out "$work/tokens/train" --heldout 0
  if [ -d "$work/pieces-debian" ]; then
    [ -e "$work/corpus-debian/manifest.json" ] ||
      "$python" scripts/carry_corpus.py unpack "$work/pieces-debian" "$work/corpus-debian" --part train
    lakh tokens pack "$work/corpus-debian" --tokenizer "$work/tokenizer" --out "$work/tokens/debian" --heldout 0
  fi
  [ -d "$work/texts" ] || "$python" scripts/heldout_texts.py "$work/corpus-heldout" "$work/texts" --bytes 2000000
  ;;
draft)
  train draft draft "${@:3}"
  export_model draft
  ;;
target)
  seconds=${3:?the seconds that the target may train}
  if [ ! -d "$work/runs/target/checkpoints" ]; then # a few steps tell how many there is time for
    lakh train recipes/python_pair.py:target --out "$work/runs/probe" "${data[@]}" --set train.steps=25 \
      --set optim.warmup_steps=25 "${@:4}" --json > "$work/probe.json"
    steps=$("$python" - "$work/runs/probe" "$seconds" "$SUSTAINED" <<'PY'
import statistics, sys
from lakh import events
step_s = [event.step_s for event in events.read(sys.argv[1], rank=0) if isinstance(event, events.StepDone)]
print(max(100, int(float(sys.argv[2]) * float(sys.argv[3]) / statistics.median(step_s[3:-1]))))
PY
    )
    echo "steps in $seconds s: $steps"
  fi
  train target target --set "train.steps=${steps:-0}" "${@:4}"
  export_model target
  ;;
target2)
  train target2 target2 --set "init_from=$(ls "$work"/gguf/target/*.gguf)" --set "train.steps=${3:?the number of steps}" \
    --set "data.mixture=[{tokens=\"$work/tokens/train\",weight=4},{tokens=\"$work/tokens/debian\"}]" "${@:4}"
  export_model target2
  ;;
ablations) # at once: each alone leaves the GPU waiting for the host
  steps=${3:?the number of steps}
  [ -d "$work/tokens/small" ] || # one file in sixteen: what the same number of steps makes of few texts, read again and again
    lakh tokens pack "$work/corpus-train" --tokenizer "$work/tokenizer" --out "$work/tokens/small" --heldout 0.9375
  more=("${@:4}")
  way() {
    train "ablation-$1" draft --set "train.steps=$steps" --set "train.eval_every=$steps" --set checkpoint.every=0 \
      --set data.micro_batch=64 "${more[@]}" "${@:2}" > "$work/ablation-$1.log" 2>&1
  }
  way base &
  way seed --set seed=2 &
  way adamw --set optim.kind=adamw &
  way cosine --set optim.schedule=cosine --set optim.min_lr_ratio=0.1 &
  way concat --set data.packing=concat &
  way untied --set model.tied=false &
  way small --set "data.mixture=[{tokens=\"$work/tokens/small\"}]" &
  wait
  for name in base seed adamw cosine concat untied small; do
    "$python" -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[2]))["val_loss"])' $name "$work/ablation-$name.json"
  done
  ;;
keep)
  export_model target
  ;;
generate)
  for name in target2 target draft; do
    [ -d "$work/hf/$name" ] || continue
    lakh eval "$work/hf/$name" --task bits-per-byte --data "$work/texts" --json > "$work/bits-$name.json"
    ask() { lakh eval generate "$work/hf/$name" --data "$work/benchmarks" --out "$work/answers/$name/$1" "${@:2}"; }
    ask greedy --task mbpp-test,infilling
    ask greedy-stripped --task humaneval --strip-prompts
    ask infilling-spm --task infilling --fill-order spm
    [ $name != draft ] || continue
    ask t08 --task humaneval --n 20 --temperature 0.8 --strip-prompts
    ask t02 --task humaneval --n 20 --temperature 0.2 --strip-prompts
    ask mbpp-t08 --task mbpp-test --n 10 --temperature 0.8 --max-tokens 160
    ask infilling-t08 --task infilling --n 10 --temperature 0.8 --max-tokens 64
  done
  ;;
score)
  find "$work/answers" -name generated.json | sort | while read -r made; do
    folder=$(dirname "$made")
    task=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["task"])' "$made")
    lakh eval score "$folder/samples.jsonl" --task "$task" --data "$work/benchmarks" \
      --out "${folder/answers/scores}" --json | tail -n 1
  done
  ;;
*)
  echo "no such stage: $stage" >&2
  exit 2
  ;;
esac
